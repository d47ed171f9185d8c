"""What several of the Lightning plug-ins share."""

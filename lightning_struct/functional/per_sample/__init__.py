"""Per-sample gradient norms: what each layer contributes, and the recorder that gathers it."""

"""Runnable benchmark tasks: ``python -m lightning_struct.recipes.NAME {fit,validate,test,predict}``."""

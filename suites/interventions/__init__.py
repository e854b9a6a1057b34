"""Interventions: freezing, converting and editing gradients during training work as in plain PyTorch."""

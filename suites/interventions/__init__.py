"""Interventions: freezing, converting and editing gradients amid training mean what they mean in plain PyTorch."""

"""What a caller does to parameters and gradients amid training has its plain meaning."""

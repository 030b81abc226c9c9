"""Communication of parameters, gradients and work items between ranks."""

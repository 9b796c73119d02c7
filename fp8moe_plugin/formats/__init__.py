"""The formats of quantized weights and the activations of experts, as values. Pure Python, without torch."""

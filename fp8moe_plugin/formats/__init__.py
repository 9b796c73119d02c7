"""The formats of quantized weights, as values. Pure Python: nothing here imports torch."""

"""The kernel launches of a call, as data. `backends` maps each target to the backend that plans and launches a call.

Pure Python: launches hold addresses, not tensors, and nothing here queries a device.
"""

"""The kernel launches of a call, as data: `backends` has the backend of each target, which plans and launches a call.

Pure Python: addresses take the place of tensors, and nothing here asks a device.
"""

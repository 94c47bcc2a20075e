"""Running the model: the shadow of the user's model, the tensors of a step, the forward pass."""

"""The parts of a checkpoint: offsets, the input of batches, and the state that a rebuild has prepared."""

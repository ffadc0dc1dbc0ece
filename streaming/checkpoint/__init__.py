"""What a checkpoint holds: offsets, the input of batches, and the state that a rebuild has prepared."""

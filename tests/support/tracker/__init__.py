"""Tables, ticks and shards for tests of what the tracker decides."""

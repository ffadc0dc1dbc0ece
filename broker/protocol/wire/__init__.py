"""The generated code of proto/pulsar.proto: Pulsar's commands and metadata."""

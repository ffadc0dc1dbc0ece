"""The code of proto/delaylake.proto, made by `make proto`."""

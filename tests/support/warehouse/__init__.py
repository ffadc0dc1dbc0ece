"""Tables as the job writes them, and what is rebuilt from them."""

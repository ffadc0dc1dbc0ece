"""The security of the admin API: tokens, roles, host names, proxies, and the record of refused calls."""

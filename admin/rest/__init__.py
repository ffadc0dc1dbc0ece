"""The routes of the admin REST API: their parameters, bodies and answers."""

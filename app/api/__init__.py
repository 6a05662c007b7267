"""HTTP: routes, bodies, answers, errors."""

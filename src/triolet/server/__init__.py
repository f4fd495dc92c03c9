"""HTTP on Hypercorn: routes, errors, Server-Sent Events. Knows no torch."""

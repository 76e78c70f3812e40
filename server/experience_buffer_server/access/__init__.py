"""Who may do what, and how that is kept: tokens, certificates, roles, and a log of refusals.

`settings` and `grants` say who has which roles, `policy` what each call takes, `guard` puts both
together for every call. `tls` holds the server's certificates, `entrance` follows the files of both.
"""

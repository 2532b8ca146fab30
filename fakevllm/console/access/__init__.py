"""Who may open the console's pages.

login_link.py        decide which one-time link logs in
first_link.py        keep the first link valid while the engine starts
link_output.py       write the links to the terminal
browser_sessions.py  decide which cookie is a login, and which form token is valid
own_path.py          decide which paths a page may link to
login.py             the login page, and the check that each other page begins with
"""

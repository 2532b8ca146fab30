"""The command `fakevllm console`: web pages that show what a proxy has logged and learnt.

settings.py          address, ledger, proxy and keys, and their checks
command.py           listen, print the link for the login, serve
console_parts.py     the parts of a running console, which its routes share
web_app.py           the ASGI application: routes, access guard, headers of each response
login_link.py        decide which one-time link logs in
link_output.py       write the links to the terminal
browser_sessions.py  decide which cookie is a login, and which form token is valid
own_path.py          decide which paths a page may link to
login.py             the login page, and the check that each other page begins with
page_renderer.py     templates, and the formats of numbers and times in them
page_texts.py        cut the long texts of a page
shared_reply.py      a reply of another program that all pages share
proxy_status.py      the status of the proxy, fetched once for all pages
proxy_settings.py    the settings of the proxy, and the job of the server
server_releases.py   the history of releases, and decisions about them
evaluation_results.py  the results of evaluations, from the evaluated rows of the ledger
problems.py          what is wrong, and what to do about it
curve_points.py      keep the points of a learning curve for all open pages
feedback_sentences.py  what became of feedback, in sentences
hook_dry_run.py      run the hook files on disk over logged groups
curve_summary.py     averages of a learning curve, and a sentence about both of its ends
text_differences.py  mark the words in which two answers differ
change_events.py     server-sent events when the ledger has changed
pages/               one module for the routes of each page
templates/ static/   HTML (Jinja2), CSS and scripts; static/vendor has files of other projects

The console is a process of its own. It only reads the ledger. It asks the proxy for the proxy's
status, and the server for the state of releases. It sends the user's feedback to the proxy. It can
also ask the proxy to reload the hooks. It sends the user's decisions about releases to the server.
A dry run of hook files takes place in a child process. The console never creates, migrates or
changes the ledger, never makes a model call, and never accepts code. Every text that is shown may
come from an app, a user or a model, so the templates escape each value. The pages load nothing from
other sites.
"""

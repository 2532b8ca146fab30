"""The command `fakevllm console`: web pages that show what a proxy has logged and learnt.

settings.py          address, ledger, proxy and keys, and their checks
command.py           listen, print the link for the login, serve
console_parts.py     the parts of a running console, which its routes share
web_app.py           the ASGI application: routes, access guard, headers of each response
page_renderer.py     templates, and the formats of numbers and times in them
page_texts.py        cut the long texts of a page
problems.py          what is wrong, and what to do about it
feedback_sentences.py  what became of feedback, in sentences
hook_dry_run.py      run the hook files on disk over logged groups
fleet_texts.py       what the page Now says about the server, its engines and its clients
terms.py             the words that a page explains
curve_summary.py     averages of a learning curve, and a sentence about both of its ends
token_panel.py       the tokens of an answer, with the classes of their colours
text_differences.py  mark the words in which two answers differ
change_events.py     server-sent events when the ledger has changed
access/              who may open the pages: one-time links, cookies, form tokens
sources/             what the pages read from the proxy, the server and the ledger
pages/               one module for the routes of each page
templates/ static/   HTML (Jinja2), CSS and scripts; static/vendor has files of other projects

The console is a process of its own. It only reads the ledger. It asks the proxy for the proxy's
status, and the server for its status, its load and the state of releases. It sends the user's
feedback to the proxy. It can also ask the proxy to reload the hooks. It sends the user's decisions
about releases to the server. A dry run of hook files takes place in a child process. The console
never creates, migrates or changes the ledger, never makes a model call, and never accepts code.
Every text that is shown may come from an app, a user or a model, so the templates escape each
value. The pages load nothing from other sites.
"""

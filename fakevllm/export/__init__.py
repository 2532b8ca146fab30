"""`fakevllm export`: dataset files from the requests in the ledger, in the formats of TRL's
trainers.

command.py        the command
group_reader.py   read a group, unless it quotes a held-out row
exported_group.py one group with its feedback, as the formats need it
conversation.py   messages and tools in the form that chat templates expect
user_feedback.py  what a user's feedback says about an answer
row_formats.py    the formats: the columns of a row, and the row for a group
columns.py        the types of columns
dataset_files.py  write rows to a JSON Lines or Parquet file, which appears when it is complete

The command never changes the ledger. Rows of evaluations and held-out rows are never exported.
"""

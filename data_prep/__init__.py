"""Text to token files: corpus, tokenizer training, tokenizing.

The command line tools here (tokenize.py, corpus.py, train_tokenizer.py) also run by path. Python
then puts this folder first on its module path, where tokenize.py would hide the standard module
`tokenize`; each tool therefore starts by taking the folder off the path again.
"""

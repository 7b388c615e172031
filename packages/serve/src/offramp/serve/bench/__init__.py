"""How fast the engine is, at which depth, and where its time goes; beside other engines, in the same minutes.

`plan` says what is measured, `prompts` draws what is asked, `contestants` runs it, `measure` lets them take turns and
adds up, `report` and `plots` show it.
"""

"""From logits to tokens: processors, draws, languages, and the judging of drafts."""

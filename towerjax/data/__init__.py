"""How does data become placed global batches?"""

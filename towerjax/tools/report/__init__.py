"""What did the compiler make of a step, and what would it be on other machines?"""

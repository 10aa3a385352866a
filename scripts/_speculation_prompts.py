"""Four kinds of prompt that speculation meets: text that quotes its prompt, and text that does not."""

PARAGRAPH = (
    "The Great Barrier Reef is the largest coral reef system in the world. It stretches for over 2,300 kilometres"
    " along the coast of Queensland, Australia, and is made up of nearly 3,000 individual reefs and 900 islands. "
    "The reef is home to more than 1,500 species of fish, 400 species of hard coral and one third of the world's "
    "soft corals. In recent decades rising sea temperatures have caused several mass bleaching events, in which "
    "corals expel the algae that feed them. Scientists estimate that the reef has lost more than half of its "
    "corals since 1995. Conservation groups are working to reduce pollution from farms, to control outbreaks of "
    "the crown-of-thorns starfish, and to breed corals that tolerate warmer water."
)

CODE = """\
class ShoppingCart:
    def __init__(self):
        self.items = []

    def add_item(self, name, price, quantity):
        self.items.append({"name": name, "price": price, "quantity": quantity})

    def remove_item(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        total = 0
        for item in self.items:
            total += item["price"] * item["quantity"]
        return total

    def print_receipt(self):
        for item in self.items:
            print(item["name"], item["quantity"], item["price"])
        print("Total:", self.total())
"""

PROMPTS = {
    "chat": "Why do people need to sleep, and how can I sleep better?",
    "summary": f"Summarize the following text, keeping its key sentences word for word:\n\n{PARAGRAPH}",
    "edit": "Rename the method total to compute_total in this code, and write out the whole class:\n\n"
    f"```python\n{CODE}```",
    "story": "Write a short story about a lighthouse keeper who finds a bottle on the beach.",
}
"""Kind -> a user's message."""

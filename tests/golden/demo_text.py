"""What the demo model reads for its golden files."""

TEXT_TOKENS = 200

TEXT = """\
The lighthouse keeper wrote the weather down every evening, in pencil, on the back of old tide tables. On most days \
there was little to say: wind from the west, sea grey, visibility ten miles. But in the winter of 1931 the notes grew \
longer. A ship called the Marianne had gone aground on the northern rocks, and for six days he rowed out with bread, \
blankets and a kettle, because the lifeboat could not pass the bar. "I asked the captain what he carried," he wrote. \
"He said: twelve hundred clocks." They were unloaded one crate at a time, and those that still ran were wound and set \
to the keeper's own watch, so that on the seventh night the whole beach was ticking. Nobody in the village slept. \
By spring every house had a clock on its mantelpiece, all of them four minutes slow, and the school bell, the ferry \
and the baker's oven had quietly agreed to be slow with them. Visitors found it charming; the railway company did \
not, and sent three letters.
"""

CHATS = (
    "What is the capital of France?",
    "Write a haiku about a river in winter, and then explain in one sentence why you chose its images.",
    "List the first five prime numbers and say what makes a number prime.",
)

UNFINISHED = (
    "def fibonacci(n):\n    ",
    "The three states of matter are",
)

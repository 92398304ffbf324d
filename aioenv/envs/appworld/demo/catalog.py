"""What can be heard and bought in the demo world; all of it is invented."""

from __future__ import annotations

# (artist, genre, songs); titles are unique over all artists.
ARTISTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Velvet Tramlines",
        "indie rock",
        ("Copper Morning", "Last Bus Home", "Paper Lanterns", "Half a Mile", "Static Garden", "Borrowed Coats"),
    ),
    (
        "Marguerite Sol",
        "jazz",
        ("Slow Elevator", "Tangerine Dusk", "Nine to Midnight", "Soft Brass", "Window Seat", "The Quiet Encore"),
    ),
    (
        "Hollow Orchard",
        "folk",
        ("Riverkeeper", "Barley and Rain", "Old Post Road", "Thistle Song", "Lamplighter", "Wintering"),
    ),
    (
        "DJ Perihelion",
        "electronic",
        ("Orbit Decay", "Neon Tide", "Signal Loss", "Glass Circuit", "Afterimage", "Low Gravity"),
    ),
    (
        "The Cobalt Choir",
        "classical",
        ("Vesper in Blue", "Harbor Hymn", "Canticle of Salt", "Evenfall", "Two Bells", "Antiphon"),
    ),
    (
        "Lucha Paloma",
        "pop",
        ("Sugarcoat", "Polaroid Heart", "Runaway Kite", "Ten Missed Calls", "Glitter Weather", "Saturday Proof"),
    ),
    (
        "Iron Heron",
        "metal",
        ("Anvil Sky", "Furnace Psalm", "Wolves at the Gate", "Rust Cathedral", "Blackwater", "Hammerfall Road"),
    ),
    (
        "Kiki Baudelaire",
        "hip hop",
        ("Rent Day", "Corner Store Opera", "Gold Tooth Grammar", "Block by Block", "Receipts", "Night Shift"),
    ),
)

SELLERS = ("Hearthside Goods", "Pinwheel Supply", "Tidewater Outfitters", "Lantern & Loom")

# (name, product type, price in dollars, seller)
PRODUCTS: tuple[tuple[str, str, float, str], ...] = (
    ("Brightloom Desk Lamp", "lamp", 34.5, "Hearthside Goods"),
    ("Fernhill Ceramic Mug", "mug", 11.25, "Hearthside Goods"),
    ("Oakrest Cutting Board", "cutting board", 27.8, "Hearthside Goods"),
    ("Stonewell Teapot", "teapot", 39.9, "Hearthside Goods"),
    ("Mistral Table Fan", "fan", 44.0, "Hearthside Goods"),
    ("Pinwheel Gel Pens", "pens", 8.4, "Pinwheel Supply"),
    ("Pinwheel Dot Notebook", "notebook", 12.6, "Pinwheel Supply"),
    ("Carto Wall Planner", "planner", 18.75, "Pinwheel Supply"),
    ("Snapfast Stapler", "stapler", 14.2, "Pinwheel Supply"),
    ("Tallgrass Sticky Notes", "sticky notes", 5.35, "Pinwheel Supply"),
    ("Tidewater Dry Bag", "dry bag", 29.95, "Tidewater Outfitters"),
    ("Longshore Head Torch", "head torch", 24.6, "Tidewater Outfitters"),
    ("Skerry Wool Blanket", "blanket", 58.0, "Tidewater Outfitters"),
    ("Gullwing Camp Stove", "camp stove", 47.15, "Tidewater Outfitters"),
    ("Keelson Water Bottle", "water bottle", 19.9, "Tidewater Outfitters"),
    ("Marlin Tent Pegs", "tent pegs", 9.85, "Tidewater Outfitters"),
    ("Amberly Scented Candle", "candle", 16.3, "Lantern & Loom"),
    ("Weftway Cushion Cover", "cushion cover", 21.45, "Lantern & Loom"),
    ("Halyard Linen Towel", "towel", 17.7, "Lantern & Loom"),
    ("Duskmere String Lights", "string lights", 26.25, "Lantern & Loom"),
)

EXTENSIONS = ("pdf", "png", "csv", "zip", "jpg", "txt")

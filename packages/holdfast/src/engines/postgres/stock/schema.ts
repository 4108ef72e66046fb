/** Tables of stock. */
import { type Statement, own, sql } from "../../../seam/sql.ts";

/**
 * No index on what changes, and half of each page left free, so that an update stays on its page (HOT). Movements refer to
 * a level by number: 13 µs per row, where the two texts took 17.
 */
export const stockTables: readonly Statement[] = [
  // elsewhere: what is on hand is kept in a table of the caller's, and this is what it was after our last movement.
  sql`CREATE TABLE IF NOT EXISTS ${own("stock_level")} (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  book text COLLATE "C" NOT NULL,
  sku text COLLATE "C" NOT NULL,
  location text COLLATE "C" NOT NULL,
  on_hand bigint NOT NULL DEFAULT 0 CONSTRAINT stock_level_range CHECK (abs(on_hand) <= 9007199254740991),
  reserved bigint NOT NULL DEFAULT 0 CHECK (reserved >= 0),
  min_level bigint NOT NULL DEFAULT 0,
  version bigint NOT NULL DEFAULT 0,
  elsewhere boolean NOT NULL DEFAULT false,
  UNIQUE (book, sku, location),
  CONSTRAINT stock_level_minimum CHECK (elsewhere OR on_hand - reserved >= min_level)
) WITH (fillfactor = 50)`,
  // Only ever added to. line of parts: of the call's lines; origin: of a return, what was sold.
  sql`CREATE TABLE IF NOT EXISTS ${own("stock_movement")} (
  level bigint NOT NULL,
  version bigint NOT NULL,
  quantity bigint NOT NULL,
  balance bigint NOT NULL,
  at timestamptz NOT NULL,
  line smallint NOT NULL,
  parts smallint NOT NULL,
  kind text NOT NULL,
  source text NOT NULL,
  external_id text COLLATE "C" NOT NULL,
  reference_type text COLLATE "C",
  reference_id text COLLATE "C",
  user_id text,
  note text,
  origin text COLLATE "C",
  PRIMARY KEY (level, version),
  UNIQUE (external_id, level)
)`,
  // Of each call the first line: the others are found by its id.
  sql`CREATE INDEX IF NOT EXISTS stock_movement_reference ON ${own("stock_movement")} (reference_id) WHERE reference_id IS NOT NULL AND line = 1`,
  sql`CREATE INDEX IF NOT EXISTS stock_movement_return ON ${own("stock_movement")} (origin, level) WHERE origin IS NOT NULL`,
  // They are written in the order of time: next to nothing to keep up, and spans of time are found.
  sql`CREATE INDEX IF NOT EXISTS stock_movement_at ON ${own("stock_movement")} USING brin (at) WITH (autosummarize = on)`,
  sql`CREATE TABLE IF NOT EXISTS ${own("stock_reservation")} (
  book text COLLATE "C" NOT NULL,
  id text COLLATE "C" NOT NULL,
  state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed', 'released')),
  until timestamptz NOT NULL,
  made_at timestamptz NOT NULL,
  levels bigint[] NOT NULL,
  quantities bigint[] NOT NULL,
  source text NOT NULL,
  reference_type text COLLATE "C",
  reference_id text COLLATE "C",
  user_id text,
  note text,
  PRIMARY KEY (book, id)
)`,
  // Of those that are open: what a level's reserved is the sum of.
  sql`CREATE TABLE IF NOT EXISTS ${own("stock_reserved")} (
  level bigint NOT NULL,
  reservation text COLLATE "C" NOT NULL,
  quantity bigint NOT NULL CHECK (quantity > 0),
  until timestamptz NOT NULL,
  PRIMARY KEY (level, reservation)
)`,
];

/** Since migration 10: pages of one SKU's history, by time. */
export const stockHistory: readonly Statement[] = [
  sql`CREATE INDEX IF NOT EXISTS stock_movement_level ON ${own("stock_movement")} (level, at)`,
];

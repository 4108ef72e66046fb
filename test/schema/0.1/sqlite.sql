-- holdfast 1: migrations
CREATE TABLE IF NOT EXISTS holdfast_migration (
  id integer NOT NULL PRIMARY KEY,
  name text NOT NULL,
  applied_at text NOT NULL DEFAULT CURRENT_TIMESTAMP
);
INSERT OR IGNORE INTO holdfast_migration (id, name) VALUES (1, 'migrations');

-- holdfast 2: leases
CREATE TABLE IF NOT EXISTS holdfast_lease (
  fence integer NOT NULL PRIMARY KEY AUTOINCREMENT,
  resource text NOT NULL,
  token text NOT NULL,
  name text NOT NULL,
  holder text NOT NULL,
  mode text NOT NULL,
  weight integer NOT NULL,
  waiting integer NOT NULL,
  since integer NOT NULL,
  until integer NOT NULL
);
CREATE INDEX IF NOT EXISTS holdfast_lease_resource ON holdfast_lease (resource);
CREATE TABLE IF NOT EXISTS holdfast_resource (
  id text NOT NULL PRIMARY KEY,
  name text NOT NULL,
  given integer NOT NULL DEFAULT 0,
  seen integer NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS holdfast_origin (id text NOT NULL PRIMARY KEY);
INSERT INTO holdfast_origin (id) SELECT lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT 1 FROM holdfast_origin);
INSERT OR IGNORE INTO holdfast_migration (id, name) VALUES (2, 'leases');

-- holdfast 3: once
CREATE TABLE IF NOT EXISTS holdfast_once (
  id text NOT NULL PRIMARY KEY,
  fingerprint text NOT NULL,
  result text NOT NULL,
  at integer NOT NULL,
  until integer NOT NULL
);
CREATE INDEX IF NOT EXISTS holdfast_once_until ON holdfast_once (until);
INSERT OR IGNORE INTO holdfast_migration (id, name) VALUES (3, 'once');

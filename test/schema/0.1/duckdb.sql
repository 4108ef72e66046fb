-- holdfast 1: migrations
CREATE TABLE IF NOT EXISTS holdfast_migration (
  id integer NOT NULL,
  name varchar NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO holdfast_migration (id, name) SELECT 1, 'migrations' WHERE NOT EXISTS (SELECT 1 FROM holdfast_migration WHERE id = 1);

-- holdfast 2: lock rows
CREATE TABLE IF NOT EXISTS holdfast_lock (id varchar NOT NULL, turn bigint NOT NULL);
INSERT INTO holdfast_migration (id, name) SELECT 2, 'lock rows' WHERE NOT EXISTS (SELECT 1 FROM holdfast_migration WHERE id = 2);

-- holdfast 3: leases
CREATE TABLE IF NOT EXISTS holdfast_lease (
  fence bigint NOT NULL,
  resource varchar NOT NULL,
  token varchar NOT NULL,
  name varchar NOT NULL,
  holder varchar NOT NULL,
  mode varchar NOT NULL,
  weight integer NOT NULL,
  waiting boolean NOT NULL,
  since bigint NOT NULL,
  until bigint NOT NULL,
  pins bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS holdfast_resource (
  id varchar NOT NULL,
  name varchar NOT NULL,
  given bigint NOT NULL,
  seen bigint NOT NULL
);
CREATE TABLE IF NOT EXISTS holdfast_fence (newest bigint NOT NULL, origin varchar NOT NULL);
INSERT INTO holdfast_fence SELECT 0, uuid()::varchar WHERE NOT EXISTS (SELECT 1 FROM holdfast_fence);
INSERT INTO holdfast_migration (id, name) SELECT 3, 'leases' WHERE NOT EXISTS (SELECT 1 FROM holdfast_migration WHERE id = 3);

-- holdfast 4: once
CREATE TABLE IF NOT EXISTS holdfast_once (
  id varchar NOT NULL,
  fingerprint varchar NOT NULL,
  result varchar NOT NULL,
  made bigint NOT NULL,
  until bigint NOT NULL
);
INSERT INTO holdfast_migration (id, name) SELECT 4, 'once' WHERE NOT EXISTS (SELECT 1 FROM holdfast_migration WHERE id = 4);

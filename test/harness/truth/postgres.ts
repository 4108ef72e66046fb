/** Where programs run on PostgreSQL. */
import { randomBytes } from "node:crypto";
import { fromPg } from "holdfast/pg";
import { Client, Pool, type PoolClient } from "pg";
import { createDatabase } from "../databases.ts";
import { type Answer, type RefusalKind, Refused, act } from "./program.ts";
import { type Ground, resetText, rowsText, valuesOf } from "./ground.ts";

const tables = `
  SET check_function_bodies = off;
  CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE TABLE u (id int PRIMARY KEY, n int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE TABLE l (v int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE TABLE f (t int NOT NULL REFERENCES t) WITH (autovacuum_enabled = off);
  CREATE TABLE e (id serial PRIMARY KEY, b int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE TABLE g (v int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE VIEW w AS SELECT coalesce(sum(n), 0) AS s FROM t;
  CREATE FUNCTION line_count() RETURNS int LANGUAGE sql STABLE AS 'SELECT count(*)::int FROM l';
  CREATE FUNCTION book() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT count(*) FROM l) >= 1 THEN RETURN 0; END IF;
    INSERT INTO l VALUES (1); RETURN 1; END $$;
  CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO l SELECT count(*) FROM l; RETURN NEW; END $$;
  CREATE TRIGGER note AFTER INSERT ON g FOR EACH ROW EXECUTE FUNCTION note();
  CREATE FUNCTION next_number() RETURNS int LANGUAGE sql STABLE AS 'SELECT coalesce(max(v), 0) + 1 FROM d';
  CREATE TABLE d (v int NOT NULL DEFAULT next_number(), b int NOT NULL) WITH (autovacuum_enabled = off);
  CREATE FUNCTION free() RETURNS boolean LANGUAGE sql STABLE AS 'SELECT NOT EXISTS (SELECT FROM public.c)';
  CREATE TABLE c (b int CHECK (free())) WITH (autovacuum_enabled = off);
  CREATE TABLE p (b int) WITH (autovacuum_enabled = off);
  CREATE TABLE q (b int) WITH (autovacuum_enabled = off);
  ALTER TABLE p ENABLE ROW LEVEL SECURITY;
  ALTER TABLE q ENABLE ROW LEVEL SECURITY;
  CREATE POLICY seen ON p FOR SELECT USING (true);
  CREATE POLICY seen ON q FOR SELECT USING (true);
  CREATE POLICY one ON p FOR INSERT WITH CHECK ((SELECT count(*) FROM q) < 1);
  CREATE POLICY one ON q FOR INSERT WITH CHECK ((SELECT count(*) FROM p) < 1);`;

const kinds: Readonly<Record<string, RefusalKind>> = {
  "40001": "serialization",
  "40P01": "deadlock",
  // Who waits for whom is known before: only those that are to be the victim of a deadlock are ended.
  "57014": "deadlock",
  "55P03": "locked",
  "23505": "duplicate",
  "23503": "violation",
  "23514": "violation",
  "42501": "violation",
};

function refused(error: unknown): Refused {
  const { code = "", message } = error as { code?: string; message: string };
  const known = kinds[code];
  if (known) return new Refused(known, message);
  if (/terminat|ended|closed|ECONN/i.test(message)) return new Refused("lost", message);
  return new Refused("other", `${code} ${message}`);
}

async function send(client: Client | PoolClient, text: string, prepared = false): Promise<Answer> {
  try {
    const queryMode = prepared ? { queryMode: "extended" } : {};
    const { rows, rowCount } = await client.query<unknown[]>({ text, rowMode: "array", ...queryMode });
    return { rows: valuesOf(rows), changed: rowCount ?? 0 };
  } catch (error) {
    throw refused(error);
  }
}

export async function onPostgres(): Promise<Ground> {
  const database = await createDatabase("postgres");
  const role = `program_${randomBytes(4).toString("hex")}`;
  const owner = new Pool({ connectionString: database.url, max: 3 });
  await owner.query(`${tables}
    CREATE ROLE ${role};
    GRANT SET ON PARAMETER deadlock_timeout TO ${role};
    GRANT ALL ON ALL TABLES IN SCHEMA public TO ${role};
    GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO ${role}`);
  const asRole = { connectionString: database.url, options: `-c role=${role}` };
  const pool = new Pool({ ...asRole, max: 6 });
  pool.on("error", () => {});
  return {
    db: fromPg(owner),
    actor: (program) => async () => {
      const client = await pool.connect();
      // Its process may be ended.
      client.on("error", ignored);
      let broken = true;
      try {
        const value = await act(program, (text) => send(client, text, program.prepared));
        broken = false;
        return value;
      } catch (error) {
        broken = !(error instanceof Refused) || error.kind === "lost";
        throw error;
      } finally {
        client.off("error", ignored);
        client.release(broken);
      }
    },
    autocommit: "may race",
    async connect() {
      const client = new Client({
        ...asRole,
        options: `${asRole.options} -c deadlock_timeout=1h`,
      });
      client.on("error", ignored);
      await client.connect();
      const { rows } = await client.query<{ id: number }>("SELECT pg_backend_pid() AS id");
      const id = String(rows[0]?.id);
      return {
        id,
        send: (text) => send(client, text),
        async end() {
          await client.end();
          for (;;) {
            const { rowCount } = await owner.query("SELECT FROM pg_stat_activity WHERE pid = $1", [id]);
            if (!rowCount) return;
          }
        },
      };
    },
    async waiting(ids) {
      const { rows } = await owner.query<{ id: number }>(
        "SELECT id FROM unnest($1::int[]) id WHERE cardinality(pg_blocking_pids(id)) > 0",
        [ids],
      );
      return new Set(rows.map(({ id }) => String(id)));
    },
    sacrifice: (id) => owner.query("SELECT pg_cancel_backend($1)", [id]).then(() => {}),
    reset: (program) => owner.query(resetText(program)),
    async rows(program) {
      const { rows } = await owner.query<unknown[]>({ text: rowsText(program), rowMode: "array" });
      return valuesOf(rows);
    },
    async close() {
      await pool.end();
      await owner.query(`DROP OWNED BY ${role}; DROP ROLE ${role}`);
      await owner.end();
      await database.drop();
    },
  };
}

const ignored = () => {};

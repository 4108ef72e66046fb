/** `explore` without a `reset` of one's own: what the actors wrote is undone, and nothing else is touched. */
import { randomBytes } from "node:crypto";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import { type Scenario, explore } from "holdfast/testing";
import mysql from "mysql2/promise";
import { Client, Pool } from "pg";
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { LiveWriter } from "./harness/live-writer.ts";

describe.each(["postgres", "postgresOld"] as const)("%s", (server) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  let database: TestDatabase;
  let pool: Pool;
  const role = `keep_${randomBytes(6).toString("hex")}`;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase(server);
    pool = new Pool({ connectionString: database.url, max: 4 });
    await pool.query(`
      CREATE TABLE person (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text UNIQUE, used int NOT NULL DEFAULT 0);
      CREATE TABLE image (id serial PRIMARY KEY, person int REFERENCES person ON DELETE CASCADE, data json, doubled int GENERATED ALWAYS AS (person * 2) STORED);
      CREATE TABLE tag (image int REFERENCES image ON DELETE CASCADE, name text);
      CREATE TABLE plain (n int, at point);
      CREATE TABLE part (id int, n int) PARTITION BY RANGE (id);
      CREATE TABLE part_low PARTITION OF part FOR VALUES FROM (0) TO (10);
      CREATE TABLE part_high PARTITION OF part FOR VALUES FROM (10) TO (20);
      CREATE TABLE base (n int); CREATE TABLE heir () INHERITS (base);
      CREATE TABLE journal (id bigserial, what text);
      CREATE TABLE logged (n int);
      CREATE TABLE aside (id bigserial PRIMARY KEY, n bigint);
      CREATE SEQUENCE number;
      CREATE VIEW people AS SELECT * FROM person;
      CREATE SCHEMA other; CREATE TABLE other.person (LIKE person); CREATE TABLE other.only_there (n int);
      CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO journal (what) VALUES (TG_TABLE_NAME); RETURN NULL; END';
      CREATE TRIGGER log AFTER INSERT OR UPDATE ON logged FOR EACH ROW EXECUTE FUNCTION log();
      CREATE FUNCTION note(what text) RETURNS void LANGUAGE sql AS 'INSERT INTO journal (what) VALUES (what)';
      INSERT INTO person (email, used) VALUES ('ada', 1), ('bob', 2);
      INSERT INTO image (person, data) VALUES (1, '{"a": 1}'), (2, NULL);
      INSERT INTO tag VALUES (1, 'x'), (1, 'x'), (2, 'y');
      INSERT INTO plain VALUES (1, '(1,2)'), (1, '(1,2)'), (NULL, NULL);
      INSERT INTO part VALUES (1, 1), (11, 1); INSERT INTO base VALUES (1); INSERT INTO heir VALUES (2);
      INSERT INTO other.person VALUES (1, 'eve', 1);
      INSERT INTO aside (n) VALUES (0); SELECT nextval('number');
      CREATE ROLE ${role} LOGIN PASSWORD 'open' IN ROLE pg_read_all_stats;
      GRANT ALL ON ALL TABLES IN SCHEMA public TO ${role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO ${role};
      GRANT ALL ON SCHEMA other TO ${role}; GRANT ALL ON ALL TABLES IN SCHEMA other TO ${role};
    `);
  });

  afterAll(async () => {
    await pool?.query(`DROP OWNED BY ${role}`);
    await pool?.query(`DROP ROLE ${role}`);
    await pool?.end();
    await database?.drop();
  });

  /** What is in each table; `exactly`: with which version of which row. Sequences too. */
  async function state(exactly: boolean): Promise<Record<string, string>> {
    const { rows } = await pool.query<{ name: string; kind: string }>(
      `SELECT oid::regclass::text AS name, relkind AS kind FROM pg_class WHERE relkind IN ('r', 'S') AND oid >= 16384
        AND relpersistence <> 't' AND relnamespace::regnamespace::text IN ('public', 'other') ORDER BY 1`,
    );
    const found: Record<string, string> = {};
    for (const { name, kind } of rows) {
      const text = kind === "S" ? "last_value || ' ' || is_called" : "t::text";
      const version = exactly && kind === "r" ? "ctid || ' ' || xmin || ' ' ||" : "";
      const sum = await pool.query<{ all: string }>(
        `SELECT coalesce(string_agg(${version} ${text}, E'\\n' ORDER BY ${version} ${text}), '') AS all FROM ONLY ${name} t`,
      );
      found[name] = sum.rows[0]?.all ?? "";
    }
    return found;
  }

  const asRole = () => {
    const url = new URL(database.url);
    url.username = role;
    url.password = "open";
    return new Pool({ connectionString: url.href, max: 4 });
  };

  type Act = (db: Pool) => Promise<unknown>;

  async function run(act: Act, invariant?: Scenario["invariant"], on = pool) {
    return explore("kept", {
      db: fromPg(on),
      actors: { A: () => act(on), B: () => act(on) },
      invariant: invariant ?? (() => {}),
    });
  }

  const one =
    (text: string): Act =>
    (db) =>
      db.query(text);
  const acts: Record<string, { act: Act; touches: readonly string[]; owner?: true }> = {
    "an insert, with an identity": {
      act: (db) => db.query("INSERT INTO person (email) VALUES ($1)", [randomBytes(6).toString("hex")]),
      touches: ["person", "image", "tag", "person_id_seq", "image_id_seq"],
    },
    "an update of a row that others refer to": {
      act: one("UPDATE person SET used = used + 1"),
      touches: ["person", "image", "tag"],
    },
    "a delete that cascades": {
      act: one("DELETE FROM person WHERE email = 'ada'"),
      touches: ["person", "image", "tag"],
    },
    "rows without a key, of which two are the same": {
      act: one("DELETE FROM plain WHERE ctid = (SELECT min(ctid) FROM plain)"),
      touches: ["plain"],
    },
    "a type that cannot be compared": {
      act: one(`UPDATE image SET data = '{"a":1}'`),
      touches: ["image", "tag"],
    },
    "a partitioned table": {
      act: one("UPDATE part SET id = 12 - id, n = n + 1 WHERE id IN (1, 11)"),
      touches: ["part_low", "part_high"],
    },
    heirs: { act: one("UPDATE base SET n = n + 1"), touches: ["base", "heir"] },
    "a schema of its own": {
      act: one("UPDATE other.person SET used = used + 1"),
      touches: ["other.person"],
    },
    "a sequence": { act: one("SELECT nextval('number')"), touches: ["number"] },
    "a rolled back insert, whose number is gone": {
      act: async (db) => {
        const client = await db.connect();
        await client.query("BEGIN");
        await client.query("INSERT INTO image (person) VALUES (1)");
        await client.query("ROLLBACK");
        client.release();
      },
      touches: ["image", "tag", "image_id_seq"],
    },
    "an advisory lock, then a write": {
      act: async (db) => {
        const client = await db.connect();
        try {
          await client.query("BEGIN; SET LOCAL lock_timeout = '5s'; SELECT pg_advisory_xact_lock(7)");
          await client.query("INSERT INTO tag VALUES (1, now()::text)");
          await client.query("COMMIT");
        } finally {
          client.release();
        }
      },
      touches: ["tag"],
    },
  };
  /** What they write is not in their text. */
  const unseen: Record<string, Act> = {
    "a trigger": one("INSERT INTO logged VALUES (1)"),
    "a function": one("SELECT note('called')"),
    "a view": one("UPDATE people SET used = used + 1"),
    "a table in another schema": async (db) => {
      const client = await db.connect();
      try {
        await client.query("SET search_path TO other");
        await client.query("INSERT INTO only_there VALUES (1)");
        await client.query("RESET search_path");
      } finally {
        client.release();
      }
    },
    "several at once": one("TRUNCATE plain, tag"),
    "a block": one("DO $$ BEGIN DELETE FROM tag; END $$"),
  };

  test.each(Object.entries(acts))(
    "%s: all is as it was, and other tables are not touched",
    async (_, { act, touches }) => {
      const [before, exactly] = [await state(false), await state(true)];
      // Each run begins with what was there: else the invariant would see it.
      const report = await run(act, async () => {
        const now = await state(true);
        for (const [name, all] of Object.entries(now))
          if (!touches.includes(name)) expect(all, name).toBe(exactly[name]);
      });
      expect(report.text).not.toContain("✗");
      expect(report.runs).toBeGreaterThan(1);
      expect(await state(false)).toEqual(before);
      const after = await state(true);
      for (const [name, all] of Object.entries(exactly))
        if (!touches.includes(name)) expect(after[name], name).toBe(all);
    },
  );

  test.each(Object.entries(unseen))("%s: all is as it was", async (_, act) => {
    const before = await state(false);
    await run(act);
    expect(await state(false)).toEqual(before);
  });

  test("what the invariant writes is undone too", async () => {
    const before = await state(false);
    await run(one("SELECT 1"), async () => {
      const { rows } = await pool.query(
        "INSERT INTO tag VALUES (1, 'judged') RETURNING (SELECT count(*)::int FROM tag) AS n",
      );
      expect(rows[0].n).toBe(3);
    });
    expect(await state(false)).toEqual(before);
  });

  test("a run begins with what was there at first", async () => {
    const used: unknown[] = [];
    await run(one("UPDATE person SET used = used + 1 WHERE email = 'ada'"), async () => {
      used.push((await pool.query("SELECT used FROM person WHERE email = 'ada'")).rows[0].used);
    });
    expect(new Set(used)).toEqual(new Set([3]));
    expect(used.length).toBeGreaterThan(1);
  });

  describe("as a user who is no superuser", () => {
    test.each(Object.entries(acts))("%s", async (_, { act, touches }) => {
      const [before, exactly] = [await state(false), await state(true)];
      const own = asRole();
      try {
        await run(act, undefined, own);
      } finally {
        await own.end();
      }
      expect(await state(false)).toEqual(before);
      const after = await state(true);
      for (const [name, all] of Object.entries(exactly))
        if (!touches.includes(name)) expect(after[name], name).toBe(all);
    });

    test("who may not see what others do is told so", async () => {
      const own = asRole();
      await pool.query(`REVOKE pg_read_all_stats FROM ${role}`);
      try {
        await expect(run(one("UPDATE person SET used = 7"), undefined, own)).rejects.toThrow(
          new RegExp(`of postgres.*may not see whether they are at work: GRANT pg_read_all_stats TO ${role}`),
        );
      } finally {
        await pool.query(`GRANT pg_read_all_stats TO ${role}`);
        await own.end();
      }
    });

    test("a trigger that cannot be turned off is told", async () => {
      const before = await state(false);
      const own = asRole();
      try {
        await pool.query("INSERT INTO logged VALUES (0)");
        // Its rows would come back, and the journal would have more of them.
        await expect(run(one("DELETE FROM logged"), undefined, own)).rejects.toThrow(
          /could not be brought back as it was.*`reset`/,
        );
      } finally {
        await own.end();
        await pool.query("TRUNCATE logged; TRUNCATE journal RESTART IDENTITY");
      }
      expect({ ...(await state(false)), journal_id_seq: "" }).toEqual({ ...before, journal_id_seq: "" });
    });
  });

  describe("and others who are at work there", () => {
    let before = 0;
    const rows = async (): Promise<number> =>
      (await pool.query("SELECT count(*)::int AS n FROM aside")).rows[0].n;
    beforeEach(async () => {
      before = await rows();
    });
    afterEach(async () => {
      await pool.query("DELETE FROM aside WHERE n > 0");
    });

    test("come and go: nothing of another table is lost, and its numbers go on", async () => {
      await using writer = new LiveWriter(database.url, "aside", true);
      await writer.more(1);
      await explore("beside", {
        db: fromPg(pool),
        actors: {
          A: () => pool.query("INSERT INTO image (person) VALUES (1)"),
          B: () => pool.query("UPDATE person SET used = used + 1"),
        },
        // While each run is under way, and not only between two of them.
        invariant: () => writer.more(1),
      }).catch((error: unknown) => {
        // One of them was there when it was looked.
        expect(String(error)).toContain("others are at work");
      });
      await writer.more(3);
      const written = await writer.end();
      expect(await rows()).toBe(before + written);
    });

    test.each([
      ["another table", one("INSERT INTO image (person) VALUES (1)")],
      ["the same table", one("UPDATE aside SET n = n WHERE n = 0")],
      ["whatever a function writes", one("SELECT note('beside')")],
    ])("stay: it is refused, and nothing of theirs is lost, %s", async (_, act) => {
      await using writer = new LiveWriter(database.url, "aside");
      await writer.more(3);
      await expect(run(act)).rejects.toThrow(
        /others are at work in this database \(session \d+ of postgres \(live writer\)\).*use a database of its own.*`reset`/,
      );
      await writer.more(3);
      const written = await writer.end();
      expect(await rows()).toBe(before + written);
    });

    test("come in the middle: it ends, and nothing of theirs is lost", async () => {
      let writer: LiveWriter | undefined;
      await expect(
        run(one("INSERT INTO aside (n) VALUES (-1)"), async () => {
          writer ??= new LiveWriter(database.url, "aside");
          await writer.more(1);
        }),
      ).rejects.toThrow("others are at work");
      await writer?.more(3);
      const written = (await writer?.end()) ?? 0;
      const { rows: kept } = await pool.query("SELECT count(*)::int AS n FROM aside WHERE n > 0");
      expect(kept[0].n).toBe(written);
      await pool.query("DELETE FROM aside WHERE n < 0");
    });

    test("but do nothing: nobody minds", async () => {
      const idle = new Client({ connectionString: database.url });
      await idle.connect();
      // Of another process, for all that is known here: its socket has not been heard of since.
      try {
        await idle.query("SELECT 1");
        await run(one("UPDATE person SET used = used + 1"));
      } finally {
        await idle.end();
      }
    });
  });

  test("more rows than can be kept: none of a large table is copied", async () => {
    await pool.query("CREATE TABLE large AS SELECT n FROM generate_series(1, 60000) n");
    try {
      await expect(run(one("SELECT 1"))).rejects.toThrow("more than 50,000 rows");
    } finally {
      await pool.query("DROP TABLE large");
    }
  });
});

describe.each(["mariadb", "mysql"] as const)("%s", (server) => {
  const reason = unavailable(server);
  beforeEach(({ skip }) => skip(reason !== undefined, reason));
  let database: TestDatabase;
  let pool: mysql.Pool;

  beforeAll(async () => {
    if (reason !== undefined) return;
    database = await createDatabase(server);
    pool = mysql.createPool({ uri: database.url, connectionLimit: 4 });
    for (const text of [
      "CREATE TABLE person (id int AUTO_INCREMENT PRIMARY KEY, email varchar(50), used int NOT NULL DEFAULT 0)",
      "CREATE TABLE image (id int AUTO_INCREMENT PRIMARY KEY, person int, FOREIGN KEY (person) REFERENCES person (id) ON DELETE CASCADE)",
      "CREATE TABLE plain (n int, t text)",
      "CREATE TABLE aside (id int AUTO_INCREMENT PRIMARY KEY, n bigint)",
      "CREATE VIEW people AS SELECT * FROM person",
      "INSERT INTO person (email, used) VALUES ('ada', 1), ('bob', 2)",
      "INSERT INTO image (person) VALUES (1), (2)",
      "INSERT INTO plain VALUES (1, 'a'), (1, 'a'), (NULL, NULL)",
      "INSERT INTO aside (n) VALUES (0)",
    ])
      await pool.query(text);
  });

  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  async function state(): Promise<Record<string, unknown>> {
    const found: Record<string, unknown> = {};
    for (const name of ["person", "image", "plain", "aside"])
      found[name] = (await pool.query(`SELECT * FROM ${name} ORDER BY 1, 2`))[0];
    return found;
  }

  const run = (act: () => Promise<unknown>, invariant: Scenario["invariant"] = () => {}) =>
    explore("kept", {
      db: fromMysql2(pool),
      actors: { A: act, B: act },
      invariant,
    });

  test.each([
    ["an insert", "INSERT INTO person (email) VALUES ('eve')"],
    ["an update", "UPDATE person SET used = used + 1"],
    ["a delete that cascades", "DELETE FROM person WHERE email = 'ada'"],
    [
      "several tables in one statement",
      "UPDATE person p JOIN image i ON i.person = p.id SET p.used = 9, i.person = 1",
    ],
    ["rows that are the same", "DELETE FROM plain LIMIT 1"],
    ["a change of case", "UPDATE plain SET t = 'A'"],
    ["a view", "UPDATE people SET used = 7"],
    ["all of it", "TRUNCATE plain"],
  ])("%s: all is as it was", async (_, text) => {
    const before = await state();
    await run(() => pool.query(text));
    expect(await state()).toEqual(before);
  });

  test("others come and go: nothing of another table is lost", async () => {
    await using writer = new LiveWriter(database.url, "aside", true);
    await writer.more(1);
    await run(
      () => pool.query("UPDATE person SET used = used + 1"),
      () => writer.more(1),
    ).catch((error: unknown) => {
      expect(String(error)).toContain("others are at work");
    });
    await writer.more(3);
    const written = await writer.end();
    const [[row]] = (await pool.query("SELECT count(*) - 1 AS n FROM aside")) as unknown as [[{ n: number }]];
    expect(row.n).toBe(written);
    await pool.query("DELETE FROM aside WHERE n > 0");
  });

  test("others stay: it is refused, and nothing of theirs is lost", async () => {
    await using writer = new LiveWriter(database.url, "aside");
    await writer.more(3);
    await expect(run(() => pool.query("UPDATE aside SET n = n WHERE n = 0"))).rejects.toThrow(
      /others are at work in this database \(session \d+ of /,
    );
    await writer.more(3);
    const written = await writer.end();
    const [[row]] = (await pool.query("SELECT count(*) - 1 AS n FROM aside")) as unknown as [[{ n: number }]];
    expect(row.n).toBe(written);
    await pool.query("DELETE FROM aside WHERE n > 0");
  });
});

/** Where a report says "exhaustive", no order is left that fails. Each of these passed once, and was called exhaustive. */
import { randomBytes } from "node:crypto";
import { fromPg } from "holdfast/pg";
import { type Scenario, explore } from "holdfast/testing";
import { Pool } from "pg";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";
import { type SqlClient, isMysql, openSql, sqlServers } from "./harness/sql.ts";

describe.each(sqlServers)("on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let sql: SqlClient;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    sql = openSql(server, database.url, 8);
    await sql.script(
      "CREATE TABLE seat (event int NOT NULL)",
      "CREATE TABLE place (id int PRIMARY KEY, seen int NOT NULL)",
      "CREATE TABLE booking (place int NOT NULL, FOREIGN KEY (place) REFERENCES place (id))",
      ...(isMysql(server)
        ? [
            "CREATE TABLE event (id int AUTO_INCREMENT PRIMARY KEY, body int NOT NULL)",
            "CREATE TABLE news (at timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), body int NOT NULL)",
          ]
        : [
            "CREATE TABLE event (id serial PRIMARY KEY, body int NOT NULL)",
            "CREATE TABLE news (at timestamptz NOT NULL DEFAULT clock_timestamp(), body int NOT NULL)",
          ]),
      isMysql(server)
        ? "CREATE FUNCTION book() RETURNS int MODIFIES SQL DATA BEGIN INSERT INTO seat VALUES (1); RETURN 1; END"
        : "CREATE FUNCTION book() RETURNS void LANGUAGE sql AS 'INSERT INTO seat VALUES (1)'",
    );
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await sql?.end();
    await database?.drop();
  });

  const readCommitted = isMysql(server)
    ? ["SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION"]
    : ["BEGIN"];
  const explored = (
    actors: Scenario["actors"],
    invariant: Scenario["invariant"],
    { reset = ["DELETE FROM seat"], ...more }: Partial<Omit<Scenario, "reset">> & { reset?: string[] } = {},
  ) =>
    explore("sound", {
      db: sql.db,
      reset: () => sql.script(...reset),
      actors,
      invariant,
      maxMs: 30_000,
      ...more,
    });

  describe("the same statement again and again", () => {
    test.for(["INSERT INTO seat VALUES (1)", "SELECT book()"])("%s was not refused", async (text) => {
      const four = async () => {
        for (let i = 0; i < 4; i++) await sql.rows(text);
      };
      const report = await explored(
        { four, count: () => sql.number("SELECT count(*) FROM seat") },
        ({ count }) => expect(count).not.toMatchObject({ value: 3 }),
      );
      expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
      expect(report.replay).toMatch(/^A/);
    });
  });

  describe("a table that is named in a way of its own, by one who looks three times while another one adds two", () => {
    const all = [
      ["SELECT count(*) FROM (seat JOIN place ON place.id = seat.event)", "INSERT INTO seat VALUES (1)"],
      [
        "SELECT count(event) FROM place x LEFT JOIN (seat CROSS JOIN place y) ON x.id = event",
        "INSERT INTO seat VALUES (1)",
      ],
    ] as const;
    const ofMysql = [
      ["SELECT count(*) FROM seat", "INSERT seat VALUES (1)"],
      ["SELECT count(*) FROM place STRAIGHT_JOIN seat", "REPLACE seat SET event = 1"],
    ] as const;
    test.for(isMysql(server) ? [...all, ...ofMysql] : all)("%s; %s", async ([look, add]) => {
      const counts: number[] = [];
      const report = await explored(
        {
          look: async () => {
            counts.length = 0;
            for (let i = 0; i < 3; i++) counts.push(await sql.number(`${look} LIMIT ${i + 1}`));
          },
          add: () => sql.script(add, add),
        },
        () => expect(new Set(counts).size).toBeLessThan(3),
        { reset: ["DELETE FROM seat", "DELETE FROM place", "INSERT INTO place VALUES (1, 0)"] },
      );
      expect(report, report.text).toMatchObject({ ok: false });
    });
  });

  describe("a fault, and then somebody else", () => {
    const reset = ["DELETE FROM place", "DELETE FROM seat", "INSERT INTO place VALUES (1, 0)"];
    const lock = "SELECT seen FROM place WHERE id = 1 FOR UPDATE";
    /** Once, as long as nobody has cancelled it. */
    const charge = (careful: boolean) => () =>
      sql.transaction(async (tx) => {
        const cancelled = (await tx.number(lock)) === 2;
        if ((await tx.number("SELECT count(*) FROM seat")) === 0 && !(careful && cancelled))
          await tx.rows("INSERT INTO seat VALUES (7)");
      });
    const cancel = () =>
      sql.transaction(async (tx) => {
        await tx.rows(lock);
        if ((await tx.change("DELETE FROM seat")) > 0) await tx.rows("UPDATE place SET seen = 2");
      });
    const run = (careful: boolean, more: Partial<Omit<Scenario, "reset">>) =>
      explored(
        { charge: charge(careful), cancel },
        async () => {
          if ((await sql.number("SELECT seen FROM place")) === 2)
            expect(await sql.number("SELECT count(*) FROM seat")).toBe(0);
        },
        { reset, ...more },
      );

    test.for(["crash", "lost commit", "twice"] as const)(
      "charged, %s, cancelled by the other one, called again",
      async (fault) => {
        expect(await run(false, {})).toMatchObject({ ok: true, coverage: "exhaustive" });
        const found = await run(false, { faults: [fault] });
        expect(found, found.text).toMatchObject({ ok: false, anomaly: "fault" });
        const again = await run(false, { faults: [fault], replay: found.replay as string });
        expect(again, again.text).toMatchObject({ ok: false, replay: found.replay });
      },
    );

    test("a report tells which part was searched", async () => {
      const all = await run(true, { faults: ["twice"] });
      expect(all, all.text).toMatchObject({ ok: true, levels: [{ faults: { coverage: all.coverage } }] });
      expect(all.text).toMatch(/; of these \d+ runs with a fault, (exhaustive|bounded ≤ \d.*)$/);
      const some = await run(true, { faults: ["twice"], preemptions: 0 });
      expect(some, some.text).toMatchObject({ ok: true, coverage: { bounded: 0 } });
      expect(some.text).toMatch(/runs with a fault, bounded ≤ 0$/);
    });
  });

  describe("an INSERT by itself, which another statement overlooks and then meets", () => {
    const reset = ["DELETE FROM booking", "DELETE FROM place", "INSERT INTO place VALUES (1, 0)"];
    const met = (insert: string, other: string, begin?: readonly string[]) =>
      explored(
        {
          insert: () => sql.rows(insert),
          other: () => (begin ? sql.transaction((tx) => tx.change(other), begin) : sql.change(other)),
        },
        ({ other: { status } = { status: "fulfilled" } }) => expect(status).toBe("fulfilled"),
        { reset },
      );

    test("by a unique index", async () => {
      const other =
        "INSERT INTO place SELECT 2, 0 FROM place WHERE id = 1 AND NOT EXISTS (SELECT * FROM place WHERE id = 2)";
      const report = await met("INSERT INTO place VALUES (2, 0)", other, readCommitted);
      expect(report, report.text).toMatchObject({ ok: false });
    });

    // InnoDB looks when it has the lock.
    test("by a foreign key", async () => {
      const other =
        "DELETE FROM place WHERE id = 1 AND NOT EXISTS (SELECT * FROM booking WHERE booking.place = 1)";
      const report = await met("INSERT INTO booking VALUES (1)", other, readCommitted);
      expect(report, report.text).toMatchObject({ ok: isMysql(server) });
    });

    test("where nobody looks, there is nothing to try", async () => {
      const report = await met("INSERT INTO place VALUES (2, 0)", "UPDATE place SET seen = 1 WHERE id = 1");
      expect(report, report.text).toMatchObject({ ok: true, coverage: "exhaustive" });
      expect(report.text).not.toContain("COMMIT (by itself)");
    });
  });

  describe("a statement by itself, and who reads in its order", () => {
    test("an outbox, polled by number, loses an event", async () => {
      const poll = async () => {
        const rows = await sql.rows("SELECT id FROM event WHERE id > (SELECT seen FROM place) ORDER BY id");
        const last = rows.at(-1)?.["id"];
        if (last !== undefined) await sql.rows(`UPDATE place SET seen = ${Number(last)}`);
        return rows.length;
      };
      const add = () => sql.rows("INSERT INTO event (body) VALUES (1)");
      const report = await explored(
        { A: add, B: add, poll },
        async ({ poll: polled }) => {
          const sent = polled?.status === "fulfilled" ? Number(polled.value) : 0;
          const left = await sql.number("SELECT count(*) FROM event WHERE id > (SELECT seen FROM place)");
          expect(sent + left).toBe(2);
        },
        { reset: ["DELETE FROM event", "DELETE FROM place", "INSERT INTO place VALUES (1, 0)"] },
      );
      expect(report, report.text).toMatchObject({ ok: false });
      expect(report.text).toContain("COMMIT (by itself)");
    });

    test("so does one that is polled by time", async () => {
      const [now, then] = isMysql(server)
        ? ["CURRENT_TIMESTAMP(6)", "'2001-01-01'"]
        : ["clock_timestamp()", "timestamptz '2001-01-01'"];
      const poll = async () => {
        const upTo = await sql.rows(`SELECT CAST(${now} AS char(40)) AS at`);
        const at = String(upTo[0]?.["at"]).trim();
        const sent = await sql.number(`SELECT count(*) FROM news WHERE at > ${then} AND at <= '${at}'`);
        return { sent, at };
      };
      const report = await explored(
        { add: () => sql.rows("INSERT INTO news (body) VALUES (1)"), poll },
        async ({ poll: polled }) => {
          const { sent, at } =
            polled?.status === "fulfilled"
              ? (polled.value as { sent: number; at: string })
              : { sent: 0, at: "" };
          expect(sent + (await sql.number(`SELECT count(*) FROM news WHERE at > '${at}'`))).toBe(1);
        },
        { reset: ["DELETE FROM news"] },
      );
      expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
    });

    test("where nobody reads them, their order does not matter", async () => {
      const add = () => sql.rows("INSERT INTO event (body) VALUES (1)");
      const report = await explored({ A: add, B: add }, () => {}, { reset: ["DELETE FROM event"] });
      expect(report, report.text).toMatchObject({ ok: true, coverage: "exhaustive", runs: 2 });
    });
  });
});

describe.each(["postgres", "postgresOld"] as const)("what belongs to a table, on %s", (server) => {
  const why = unavailable(server);
  let database: TestDatabase;
  let pool: Pool;
  let owner: Pool;
  const role = `limited_${randomBytes(4).toString("hex")}`;

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    owner = new Pool({ connectionString: database.url, max: 3 });
    await owner.query(`
      SET check_function_bodies = off;
      CREATE TABLE seat (event int NOT NULL);
      CREATE FUNCTION free() RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER AS
        'SELECT NOT EXISTS (SELECT FROM public.checked) AND NOT EXISTS (SELECT FROM public.in_domain)
          AND NOT EXISTS (SELECT FROM public.in_domains) AND NOT EXISTS (SELECT FROM public.policed)';
      CREATE FUNCTION free_now() RETURNS boolean LANGUAGE plpgsql AS
        'BEGIN RETURN NOT EXISTS (SELECT FROM public.checked_now); END';
      CREATE FUNCTION pretended(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT count(*)::int FROM public.generated';
      CREATE FUNCTION harmless() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN floor(random() * 5); END';
      CREATE FUNCTION next_number() RETURNS int LANGUAGE sql STABLE AS 'SELECT coalesce(max(n), 0) + 1 FROM defaulted';
      CREATE TABLE defaulted (n int DEFAULT next_number(), body int);
      CREATE TABLE checked (body int CHECK (free()));
      CREATE TABLE checked_now (body int CHECK (free_now()));
      CREATE DOMAIN only_one AS int CHECK (free());
      CREATE TABLE in_domain (body only_one);
      CREATE TABLE in_domains (body only_one[]);
      CREATE TABLE generated (body int, before int GENERATED ALWAYS AS (pretended(body)) STORED);
      CREATE TABLE policed (body int);
      ALTER TABLE policed ENABLE ROW LEVEL SECURITY;
      CREATE POLICY one ON policed USING (true) WITH CHECK (free());
      CREATE TABLE counted (body int);
      CREATE TABLE counted_too (body int);
      ALTER TABLE counted ENABLE ROW LEVEL SECURITY;
      ALTER TABLE counted_too ENABLE ROW LEVEL SECURITY;
      CREATE POLICY seen ON counted FOR SELECT USING (true);
      CREATE POLICY seen ON counted_too FOR SELECT USING (true);
      CREATE POLICY one ON counted FOR INSERT WITH CHECK ((SELECT count(*) FROM counted_too) < 1);
      CREATE POLICY one ON counted_too FOR INSERT WITH CHECK ((SELECT count(*) FROM counted) < 1);
      CREATE TABLE plain (body int DEFAULT harmless());
      CREATE FUNCTION book() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF (SELECT count(*) FROM seat) >= 1 THEN RETURN false; END IF;
        INSERT INTO seat VALUES (1); RETURN true; END $$;
      CREATE VIEW booking AS SELECT book() AS done;
      CREATE VIEW bookings AS SELECT * FROM booking;
      CREATE ROLE ${role};
      GRANT ALL ON ALL TABLES IN SCHEMA public TO ${role};
      GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO ${role}`);
    pool = new Pool({ connectionString: database.url, max: 6, options: `-c role=${role}` });
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await owner?.query(`DROP OWNED BY ${role}; DROP ROLE ${role}`);
    await owner?.end();
    await database?.drop();
  });

  const tables =
    "seat,defaulted,checked,checked_now,in_domain,in_domains,generated,policed,counted,counted_too,plain";
  const explored = (actors: Scenario["actors"], invariant: Scenario["invariant"]) =>
    explore("sound", {
      db: fromPg(owner),
      reset: () => owner.query(`TRUNCATE ${tables}`),
      actors,
      invariant,
      maxMs: 30_000,
    });
  const many = async (text: string) => Number(Object.values((await owner.query(text)).rows[0] ?? {})[0]);
  test("a default reads", async () => {
    const act = () => pool.query("INSERT INTO defaulted (body) VALUES (1)");
    const report = await explored({ A: act, B: act }, async () =>
      expect(await many("SELECT count(*) - count(DISTINCT n) FROM defaulted")).toBe(0),
    );
    expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("a generated column reads", async () => {
    const act = () => pool.query("INSERT INTO generated (body) VALUES (1)");
    const report = await explored({ A: act, B: act }, async () =>
      expect(await many("SELECT count(*) - count(DISTINCT before) FROM generated")).toBe(0),
    );
    expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
  });

  test.for([
    ["checked", "checked"],
    ["checked_now", "checked_now"],
    ["in_domain", "in_domain"],
    ["in_domains", "in_domains"],
    ["policed", "policed"],
    ["counted", "counted_too"],
  ] as const)("a check, a domain or a policy lets one in: %s and %s", async ([a, b]) => {
    const insert = (table: string) => () =>
      pool.query(`INSERT INTO ${table} (body) VALUES (${table === "in_domains" ? "'{1}'" : 1})`);
    const report = await explored({ A: insert(a), B: insert(b) }, async () => {
      const others = a === b ? "" : ` + (SELECT count(*) FROM ${b})`;
      expect(await many(`SELECT (SELECT count(*) FROM ${a})${others}`)).toBe(1);
    });
    expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
  });

  test("a function that reads nothing does not make it more than it is", async () => {
    const act = () => pool.query("INSERT INTO plain VALUES (DEFAULT)");
    const report = await explored({ A: act, B: act }, () => {});
    expect(report, report.text).toMatchObject({ ok: true, coverage: "exhaustive", runs: 2 });
  });

  test.for(["booking", "bookings"])("a view that calls a function: %s", async (view) => {
    const act = async () => (await pool.query(`SELECT done FROM ${view}`)).rows[0].done;
    const report = await explored({ A: act, B: act }, async () =>
      expect(await many("SELECT count(*) FROM seat")).toBe(1),
    );
    expect(report, report.text).toMatchObject({ ok: false, preemptions: 1 });
  });
});

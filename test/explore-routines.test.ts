/** Holdfast's own procedures on MySQL and MariaDB are described to `explore`, so that what calls them can be exhaustive. */
import { holdfast, key } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { explore } from "holdfast/testing";
import { type Pool, type RowDataPacket, createPool } from "mysql2/promise";
import { afterAll, beforeAll, beforeEach, describe, expect, test } from "vitest";
import { type TestDatabase, createDatabase, unavailable } from "./harness/databases.ts";

describe.each(["mariadb", "mysql"] as const)("on %s", (server) => {
  const why = unavailable(server);
  const schemas = ["holdfast", "shop"];
  let database: TestDatabase;
  let pool: Pool;

  const rows = async (text: string) => (await pool.query<RowDataPacket[]>(text))[0];

  beforeAll(async () => {
    if (why !== undefined) return;
    database = await createDatabase(server);
    pool = createPool({ uri: database.url, connectionLimit: 6 });
    for (const schema of schemas) await holdfast(fromMysql2(pool), { schema }).migrate();
    await rows("CREATE TABLE seat (event int NOT NULL)");
  });
  beforeEach(({ skip }) => skip(why !== undefined, why));
  afterAll(async () => {
    await pool?.end();
    await database?.drop();
  });

  test("each of them is described, with every table that its body names", async () => {
    const { routines } = await described();
    const tables = (
      await rows(
        "SELECT LOWER(table_name) AS name FROM information_schema.tables WHERE table_schema = DATABASE()",
      )
    ).map(({ name }) => String(name));
    const found = await rows(
      "SELECT LOWER(routine_name) AS name, LOWER(routine_definition) AS body FROM information_schema.routines WHERE routine_schema = DATABASE()",
    );
    expect(found.length).toBe(7 * schemas.length);
    const bodies = new Map(found.map(({ name, body }) => [String(name), String(body)]));
    /** Also by those that it calls. */
    const named = (name: string): string[] => {
      const words = new Set(bodies.get(name)?.match(/\w+/g));
      const within = [...bodies.keys()].filter((each) => each !== name && words.has(each));
      return [...tables.filter((table) => words.has(table)), ...within.flatMap(named)];
    };
    for (const [name, body] of bodies) {
      const effect = routines.get(name);
      expect(effect, name).toBeDefined();
      const said = new Set<string>(effect?.tables);
      if (!said.has("*")) expect([...said].toSorted(), name).toEqual([...new Set(named(name))].toSorted());
      else expect(effect?.whole, name).toBe(false);
      // What it is given is executed: nobody can say which tables that names.
      expect(said.has("*"), name).toBe(/\bprepare\b/.test(body));
      expect(effect?.boundary === "begins", name).toBe(
        /\bautocommit = 0/.test(body) && !/\bcommit;/.test(body),
      );
      if (effect?.whole) expect(effect.boundary === "commits", name).toBe(/\bcommit;/.test(body));
    }
  });

  async function described() {
    const connection = await pool.getConnection();
    try {
      const query = async (statement: { readonly parts?: readonly string[] }) => ({
        rows: (await connection.query<RowDataPacket[]>((statement.parts ?? []).join("")))[0],
      });
      const { routines } = fromMysql2(pool).engine.protocol ?? {};
      return { routines: (await routines?.({ query } as never)) ?? new Map<string, never>() };
    } finally {
      connection.release();
    }
  }

  test.for(schemas)("a transaction with a lock is exhaustive, in the schema %s", async (schema) => {
    const hf = holdfast(fromMysql2(pool), { schema });
    const book = (keyOf: (name: string) => string) => (name: string) => () =>
      hf.transaction({ lock: key("event", keyOf(name)) }, async ({ client }) => {
        const [[{ n }]] = (await client.query("SELECT count(*) AS n FROM seat")) as unknown as [
          [{ n: number }],
        ];
        if (n === 0) await client.query("INSERT INTO seat VALUES (1)");
      });
    const explored = (act: (name: string) => () => Promise<unknown>) =>
      explore("lock", {
        db: fromMysql2(pool),
        reset: () => rows("DELETE FROM seat"),
        actors: { A: act("A"), B: act("B") },
        invariant: async () => expect((await rows("SELECT * FROM seat")).length).toBe(1),
        maxMs: 30_000,
      });
    const right = await explored(book(() => "one"));
    expect(right, right.text).toMatchObject({ ok: true, coverage: "exhaustive" });
    // Each with a lock of its own, which excludes nobody.
    const wrong = await explored(book((name) => name));
    expect(wrong, wrong.text).toMatchObject({ ok: false });
  });
});

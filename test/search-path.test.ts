/**
 * Whoever may create a function can make one that is taken for the server's own, and that runs with the rights of whoever calls it
 * (CVE-2018-1058). Everything that Holdfast sends is run here in a database full of those, and none of them may be used.
 */
import { chmodSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type Holdfast, holdfast, key, versioned } from "holdfast";
import { fromCitus } from "holdfast/citus";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { explore } from "holdfast/testing";
import { Client, Pool, type PoolClient } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { type EmbeddedPostgres, startPostgres } from "../packages/cli/src/embedded.ts";
import { command, start } from "./harness/command.ts";
import { useAll, useLocks } from "./harness/every-call.ts";
import { type Hostile, attacker, hostile, hostileSettings } from "./harness/hostile.ts";
import { binariesOf, majors } from "./harness/majors.ts";
import { pgbouncerPackage, startPgbouncer } from "./harness/pgbouncer.ts";
import { terminal } from "./harness/terminal.ts";
import { eventually } from "./harness/wait.ts";

/** As it is by default, and one that puts the server's own things last. */
const paths = { default: undefined, "evil, public, pg_catalog": "evil, public, pg_catalog" } as const;
type Path = keyof typeof paths;

function at(url: string, path: Path): string {
  const there = new URL(url);
  if (paths[path] !== undefined)
    there.searchParams.set("options", `-c search_path=${paths[path].replaceAll(" ", "")}`);
  return there.href;
}

const postgresKeys = [key.hashtext("x"), key.hashtextextended("y"), key.bigint(7n), key.int(1, 2)];

class Place {
  readonly server: EmbeddedPostgres;
  readonly url: string;
  readonly shadows: Hostile;
  readonly #folder: string;

  private constructor(server: EmbeddedPostgres, url: string, shadows: Hostile, folder: string) {
    this.server = server;
    this.url = url;
    this.shadows = shadows;
    this.#folder = folder;
  }

  static async start(binDir: string | undefined): Promise<Place> {
    const folder = mkdtempSync(join(tmpdir(), "holdfast-hostile-"));
    chmodSync(folder, 0o777);
    const server = await startPostgres({
      settings: hostileSettings(folder),
      ...(binDir !== undefined && { binDir }),
    });
    await server.createDatabase("shop");
    const url = server.url("shop");
    return new Place(server, url, await hostile(url, folder), folder);
  }

  /** By an administrator, whose names are safe. */
  async ask(text: string): Promise<Record<string, unknown>[]> {
    const client = new Client({ connectionString: this.url });
    await client.connect();
    try {
      await client.query("SET search_path = pg_catalog");
      return (await client.query(text)).rows;
    } finally {
      await client.end();
    }
  }

  async unharmed(): Promise<void> {
    const used = new Set(await this.shadows.used());
    if (used.size > 0) throw new Error(`shadows were used:\n${[...used].slice(0, 20).join("\n")}`);
    if (await this.shadows.isSuper()) throw new Error(`${attacker} is a superuser now`);
  }

  async stop(): Promise<void> {
    await this.server.stop();
    rmSync(this.#folder, { recursive: true, force: true });
  }
}

async function using(
  url: string,
  work: (hf: Holdfast<PoolClient>) => Promise<void>,
  of = (pool: Pool) => fromPg(pool),
): Promise<void> {
  const pool = new Pool({ connectionString: url, max: 6 });
  const hf = holdfast(of(pool));
  try {
    await work(hf);
  } finally {
    await hf.close();
    await pool.end();
  }
}

/** Each routine, with nothing for every argument: it is compiled, and its first statements run. */
const callAll = `DO $do$
DECLARE one text;
BEGIN
  FOR one IN SELECT format('SELECT %s(%s)', p.oid::regproc, (SELECT string_agg('NULL', ', ') FROM unnest(p.proargtypes) t))
    FROM pg_proc p WHERE p.pronamespace = 'holdfast'::regnamespace AND p.prorettype <> 'trigger'::regtype AND p.prokind = 'f' LOOP
    BEGIN
      PERFORM set_config('search_path', 'evil, public, pg_catalog', true);
      EXECUTE one;
    EXCEPTION WHEN OTHERS THEN NULL;
    END;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog', true);
  END LOOP;
END $do$`;

const all = majors.map((major) => ({ major, programs: binariesOf(major) }));
const found = all.flatMap(({ major, programs }) =>
  typeof programs === "object" ? [] : [{ major, programs }],
);

test.for(majors)("PostgreSQL %i is there", (major, { skip }) => {
  const programs = all.find((each) => each.major === major)?.programs;
  const why = typeof programs === "object" ? programs.unavailable : undefined;
  // Nobody has built that one for npm.
  const isBuilt = major !== 14 || process.arch !== "arm64";
  if (why !== undefined) console.warn(`PostgreSQL ${major} is not available: ${why}`);
  skip(isBuilt && why !== undefined, why);
});

describe.for(found)("PostgreSQL $major", ({ programs }) => {
  let place: Place;
  beforeAll(async () => {
    place = await Place.start(programs);
  }, 240_000);
  afterAll(() => place?.stop());

  test("the shadows are there, and are noticed", async () => {
    const client = new Client({ connectionString: at(place.url, "evil, public, pg_catalog") });
    await client.connect();
    await client.query("SELECT 1 = 1, 'a'::text, count(*) FROM pg_locks");
    await client.query("SET search_path TO DEFAULT");
    await client.query("SET search_path = public");
    await client.query("SELECT cardinality(ARRAY[1::bigint]), t.n FROM unnest(ARRAY['a'::text]) t (n)");
    await client.end();
    const used = (await place.shadows.used()).join("\n");
    const these = [
      "=(integer,integer)",
      "type text",
      "count(*)",
      "pg_locks",
      "cardinality(int8[])",
      "unnest(text[])",
    ];
    for (const what of these) expect(used).toContain(what);
    expect(await place.shadows.isSuper()).toBe(true);
    await place.ask(`ALTER ROLE ${attacker} NOSUPERUSER`);
  });

  test("migrate, under a path that is the attacker's", async () => {
    await using(at(place.url, "evil, public, pg_catalog"), async (hf) => {
      await hf.migrate();
      expect((await hf.migrations()).every(({ state }) => state === "applied")).toBe(true);
    });
    await place.unharmed();
    const free = await place.ask(
      "SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'holdfast'::regnamespace AND p.prosqlbody IS NULL AND NOT coalesce(p.proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)",
    );
    expect(free).toEqual([]);
    const theirs = await place.ask(
      "SELECT a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid WHERE c.relnamespace = 'holdfast'::regnamespace AND t.typnamespace = 'evil'::regnamespace",
    );
    expect(theirs).toEqual([]);
  });

  test("printed SQL, under such a path, as one message", async () => {
    await place.server.createDatabase("printed", "shop");
    const url = place.server.url("printed");
    const client = new Client({ connectionString: at(url, "evil, public, pg_catalog") });
    await client.connect();
    try {
      await client.query("DROP SCHEMA holdfast CASCADE");
      const text = await printed();
      await client.query(text);
      expect((await client.query("SHOW search_path")).rows).toEqual([
        { search_path: "evil,public,pg_catalog" },
      ]);
      await client.query("DROP SCHEMA holdfast CASCADE");
      await expect(client.query("COMMIT").then(() => runEach(client, text))).rejects.toThrow(
        "in one transaction",
      );
    } finally {
      await client.end();
    }
    await place.unharmed();
  });

  test.for(Object.keys(paths) as Path[])(
    "every pattern, with the path %s",
    { timeout: 240_000 },
    async (path) => {
      await using(at(place.url, path), async (hf) => {
        await useLocks(hf, postgresKeys);
        await useAll(hf, path);
      });
      await place.unharmed();
    },
  );

  test("every routine, called by hand", async () => {
    await place.ask(callAll);
    await place.unharmed();
  });
});

/** Every verb that asks a database, as an administrator starts it. */
const verbs = [
  "migrate --yes",
  "migrate status",
  "doctor --json",
  "locks",
  "locks --json",
  "keys upload:1",
  "keys",
  "keys --find 42",
  "quota",
  "quota show uploads",
  "quota show uploads ada --limit 5",
  "quota history uploads ada",
  "quota grant uploads ada 5 --id gift --yes",
  "quota grants uploads ada",
  "quota revoke uploads ada gift --yes",
  "quota limit uploads ada 7 --yes",
  "quota plan uploads ada pro --yes",
  "quota refund uploads ada first --yes",
  "quota reconcile uploads",
  "quota reset uploads ada --yes",
  "stock",
  "stock add CAP 5 --yes",
  "stock take CAP 1 --yes",
  "stock adjust CAP 3 --yes",
  "stock history CAP",
  "stock channels",
  "stock reconcile",
  "queue",
  "queue show emails",
  "queue jobs emails",
  "queue jobs emails --state running",
  "queue job emails 1",
  "queue pause emails --yes",
  "queue resume emails --yes",
  "queue retry emails --all --yes",
  "queue discard emails 1 --yes",
  "queue prune emails --before 1d --yes",
  "schedule",
  "schedule show nightly",
  "schedule pause nightly --yes",
  "schedule resume nightly --yes",
  "lease",
  "lease show export:1",
  "lease end export:1 --yes",
  "strategy",
  "audit",
  "certify",
  "exec --lock deploy -- true",
  "exec --lock deploy --lease -- true",
  "import pg-boss --yes",
  "import graphile-worker --yes",
].map((line) => line.split(" "));

describe("on PostgreSQL 18", () => {
  let place: Place;
  let pool: Pool;
  let hf: Holdfast<PoolClient>;
  beforeAll(async () => {
    place = await Place.start(undefined);
    pool = new Pool({ connectionString: place.url, max: 6 });
    hf = holdfast(fromPg(pool));
    await hf.migrate();
    await quota(hf, { name: "uploads", limit: 5 }).consume("ada", 1, { id: "first" });
    await stock(hf).increase("CAP", 5);
    await queue(hf, "emails").enqueue({ to: "ada" });
    await schedule(hf, "nightly", { every: 60_000 }, async () => {}).runNow();
    await hf.lease(key("export", 1), { ttl: 600_000 });
    await place.unharmed();
  }, 240_000);
  afterAll(async () => {
    await hf?.close();
    await pool?.end();
    await place?.stop();
  });

  const run = async (path: Path, args: readonly string[]): Promise<void> => {
    const { code, err } = await command(args, { env: { HOLDFAST_URL: at(place.url, path) } });
    // 1: the answer is no. Of what to import there is nothing.
    const fine = args[0] === "import" ? /has no tables here/.test(err) : code === 0 || code === 1;
    expect(fine, `${args.join(" ")}: ${code} ${err}`).toBe(true);
  };

  // With another path these cannot be told from the same names of the server's own: what holds there holds here.
  test("what made an attacker a superuser with the default path", { timeout: 240_000 }, async () => {
    for (const line of ["quota show uploads", "doctor", "locks", "stock reconcile"])
      await run("default", line.split(" "));
    await place.unharmed();
  });

  test("every verb, with a path that is the attacker's", { timeout: 600_000 }, async () => {
    const victim = new Client({ connectionString: place.url });
    victim.on("error", () => {});
    await victim.connect();
    const { rows } = await victim.query<{ pid: number }>(
      "SELECT pg_backend_pid() AS pid, pg_advisory_lock(1)",
    );
    // Those that begin with the same word one after the other: some look at what others end.
    const kill = ["kill", String(rows[0]?.pid), "--yes"];
    const left = [...Map.groupBy([...verbs, kill], ([verb]) => verb).values()];
    const one = async () => {
      for (let group = left.shift(); group; group = left.shift())
        for (const args of group) await run("evil, public, pg_catalog", args);
    };
    await Promise.all([one(), one(), one()]);
    await victim.end().catch(() => {});
    await place.unharmed();
  });

  test(
    "verbs that make a database of their own, or go on until they are stopped",
    { timeout: 240_000 },
    async () => {
      const url = at(place.url, "evil, public, pg_catalog");
      for (const args of [
        ["bench", "locks", "--seconds", "0.05", "--connections", "2", "--yes", "--url", url],
        ["demo", "--only", "quota", "--processes", "1", "--callers", "2", "--url", url],
        // Not in a copy: what a scenario does is not qualified.
        [
          "race",
          "test/races/command/quota.ts",
          "--only",
          "locked",
          "--max-ms",
          "2000",
          "--empty",
          "--url",
          url,
        ],
      ]) {
        const { code, out, err } = await command(args);
        expect(code === 0 || code === 1, `${args.join(" ")}: ${code} ${out} ${err}`).toBe(true);
        await place.unharmed();
      }
      const holding = start(["hold", "upload:9", "--url", url]);
      await eventually(() => expect(holding.err() + holding.out()).toContain("upload:9"));
      // It looks who waits.
      const waiting = start(["exec", "--lock", "upload:9", "--wait", "60000", "--url", url, "--", "true"]);
      await eventually(() => expect(holding.err() + holding.out()).toMatch(/wait/));
      const top = terminal(["top", "--url", url], { columns: 100, rows: 24 });
      await top.until("upload:9");
      top.type("b");
      top.type("q");
      expect(await top.ended).toBe(0);
      holding.child.kill("SIGINT");
      expect((await holding.done).code).toBe(0);
      expect((await waiting.done).code).toBe(0);
      await place.unharmed();
    },
  );

  // Before PostgreSQL 15 everybody who comes in may make functions there.
  test.for([
    ["bench", "locks", "--seconds", "0.05", "--connections", "2", "--yes"],
    ["demo", "--only", "quota", "--processes", "1", "--callers", "2"],
  ])("nobody else comes into the database that %s makes", { timeout: 120_000 }, async (args) => {
    await place.ask(`ALTER ROLE ${attacker} PASSWORD 'pw'`);
    const running = start([...args, "--url", place.url]);
    let isOver = false;
    void running.done.then(() => (isOver = true));
    const came: string[] = [];
    const refused: string[] = [];
    while (!isOver) {
      const made = await place.ask(
        "SELECT datname AS name FROM pg_database WHERE datname ~ '^holdfast_(bench|demo)_'",
      );
      for (const { name } of made) {
        const login = { user: attacker, password: "pw" };
        const client = new Client({ connectionString: place.server.url(String(name), login) });
        client.on("error", () => {});
        await client.connect().then(
          () => came.push(String(name)),
          (error: unknown) => refused.push(String((error as { code?: unknown }).code)),
        );
        await client.end().catch(() => {});
      }
    }
    expect(await running.done).toMatchObject({ code: 0 });
    expect(came).toEqual([]);
    expect(refused).toContain("42501");
  });

  test.for(Object.keys(paths) as Path[])("rows of the caller's own, with the path %s", async (path) => {
    await place.ask("DROP TABLE IF EXISTS public.parcel");
    await place.ask(
      "CREATE TABLE public.parcel (code varchar(9), place name, n int2, kind text[], version int4 NOT NULL, PRIMARY KEY (code, place))",
    );
    await place.ask("INSERT INTO public.parcel VALUES ('a', 'x', 1, '{k}', 0), ('b', 'y', 2, '{k}', 0)");
    await using(at(place.url, path), async (there) => {
      const [a, b] = [
        { code: "a", place: "x" },
        { code: "b", place: "y" },
      ];
      await there.transaction(async (tx) => {
        expect(await tx.rows("public.parcel", [a])).toHaveLength(1);
        expect(await tx.rows("public.parcel", [b, a])).toHaveLength(2);
        expect(await tx.rows("public.parcel", { code: ["a", "b"], n: 1 })).toHaveLength(1);
        const where = { code: ["a", "b"] };
        expect(await tx.rows("public.parcel", where, { orderBy: { n: "desc" }, limit: 1 })).toHaveLength(1);
        expect(await tx.rows("public.parcel", where, { wait: "skip" })).toHaveLength(2);
        const gone = { code: "c", place: "z" };
        expect(await tx.rows("public.parcel", [a, gone], { missing: "report" })).toMatchObject({
          missing: [gone],
        });
        // Somebody waits for it: who holds it is looked up.
        const refused = there.outside(() =>
          there.transaction({ retry: false }, (other) => other.rows("public.parcel", [a], { wait: 20 })),
        );
        await expect(refused).rejects.toMatchObject({ code: "HF_LOCK_TIMEOUT" });
      });
      const parcels = versioned(there, "public.parcel", { key: ["code", "place"], version: "version" });
      expect(await parcels.update(a, async () => ({ n: 5 }))).toMatchObject({ n: 5, version: 1 });
    });
    await place.unharmed();
  });

  // As a superuser, who can turn triggers off, and as one who cannot.
  test.for(["postgres", "app"])(
    "explore, which keeps tables and brings them back, as %s",
    { timeout: 120_000 },
    async (role) => {
      await place.ask("DROP TABLE IF EXISTS public.image, public.person");
      await place.ask(
        "CREATE TABLE public.person (id int PRIMARY KEY, n int NOT NULL, serial int GENERATED ALWAYS AS IDENTITY)",
      );
      await place.ask("CREATE TABLE public.image (id int PRIMARY KEY REFERENCES public.person)");
      await place.ask("INSERT INTO public.person VALUES (1, 0), (2, 0)");
      await place.ask("INSERT INTO public.image VALUES (1)");
      const url = new URL(at(place.url, "evil, public, pg_catalog"));
      if (role === "app") {
        await place.ask("CREATE ROLE app LOGIN PASSWORD 'pw' IN ROLE pg_read_all_data, pg_read_all_stats");
        for (const table of ["person", "image"]) await place.ask(`ALTER TABLE public.${table} OWNER TO app`);
        await place.ask("GRANT USAGE ON SCHEMA evil TO app");
        [url.username, url.password] = ["app", "pw"];
      }
      const raced = new Pool({ connectionString: url.href, max: 4 });
      const act = async () => {
        const { rows } = await raced.query("SELECT n FROM public.person WHERE id OPERATOR(pg_catalog.=) 1");
        const n = Number(rows[0].n) + 1;
        await raced.query(`UPDATE public.person SET n = ${n} WHERE id OPERATOR(pg_catalog.=) 1`);
        await raced.query("DELETE FROM public.person WHERE id OPERATOR(pg_catalog.=) 2");
        await raced.query("INSERT INTO public.person (id, n) VALUES (3, 0) ON CONFLICT DO NOTHING");
      };
      try {
        const { ok } = await explore("hostile", {
          db: fromPg(raced),
          actors: { A: act, B: act },
          invariant: async () => {
            const { rows } = await raced.query(
              "SELECT n FROM public.person WHERE id OPERATOR(pg_catalog.=) 1",
            );
            expect(rows[0].n).toBe(2);
          },
          maxMs: 20_000,
        });
        expect(ok).toBe(false);
      } finally {
        await raced.end();
      }
      expect(await place.ask("SELECT id, n FROM public.person ORDER BY id")).toEqual([
        { id: 1, n: 0 },
        { id: 2, n: 0 },
      ]);
      await place.unharmed();
    },
  );

  test("the doctor, through a pooler in statement mode", { timeout: 120_000 }, async ({ skip }) => {
    skip(!pgbouncerPackage.installed(), "no PgBouncer");
    // What a client asks for in its options does not come through: the role has it.
    await place.ask("ALTER ROLE postgres IN DATABASE shop SET search_path = evil, public, pg_catalog");
    const pooler = await startPgbouncer(place.server, "statement");
    try {
      const url = pooler.url.replace(/\/postgres$/, "/shop");
      const { code, out, err } = await command(["doctor", "--json", "--url", url]);
      expect(code, err).toBe(1);
      const { checks } = JSON.parse(out) as { checks: { status: string }[] };
      expect(checks.filter(({ status }) => status === "failed")).toEqual([]);
      expect(checks.length).toBeGreaterThan(20);
    } finally {
      await pooler.stop();
      await place.ask("ALTER ROLE postgres IN DATABASE shop RESET search_path");
    }
    await place.unharmed();
  });

  test.for(Object.keys(paths) as Path[])(
    "the stores of Citus, with the path %s",
    { timeout: 240_000 },
    async (path) => {
      await using(
        at(place.url, path),
        (there) => useAll(there, `citus ${path}`),
        (of) => fromCitus(fromPg(of)),
      );
      await place.unharmed();
    },
  );
});

const printed = async () => (await command(["migrate", "print", "--engine", "postgres"])).out;

/** As a tool that sends statements one by one. */
async function runEach(client: Client, text: string): Promise<void> {
  for (const part of text.split(";\n")) await client.query(part);
}

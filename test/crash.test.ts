/**
 * A server that crashes while COMMIT is under way. Ids of transactions whose WAL was not flushed are handed out again:
 * what the server then says of ours, it says of somebody else's.
 */
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { type Holdfast, holdfast, key, once, sql } from "holdfast";
import { fromPg } from "holdfast/pg";
import { Client, Pool } from "pg";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { killBackend } from "./harness/killed-backend.ts";
import { oldBinaries } from "./harness/old-postgres.ts";
import { type Proxy, startProxy } from "./harness/proxy.ts";

const rounds = process.env["HOLDFAST_LONG"] ? 25 : 3;

// Only what a crash can lose is of interest: nothing is flushed but by a COMMIT.
const settings = { wal_writer_delay: "10s", autovacuum: "off", fsync: "off", checkpoint_timeout: "1d" };

type Crash = "an immediate restart" | "a killed backend" | "an orderly restart";

describe.each([
  ["PostgreSQL 18", "postgres"],
  ["an older PostgreSQL", "postgresOld"],
] as const)("%s", (_, name) => {
  const why = unavailable(name);
  let server: EmbeddedPostgres;
  let proxy: Proxy;

  beforeAll(async () => {
    if (why !== undefined) return;
    const binDir = name === "postgresOld" ? oldBinaries() : undefined;
    server = await startPostgres({ settings, ...(binDir && { binDir }) });
    await ask("CREATE TABLE effect (who text NOT NULL); CREATE TABLE noise (n int NOT NULL)");
    proxy = await startProxy({ port: server.port });
  });

  afterAll(async () => {
    await proxy?.close();
    await server?.stop();
  });

  async function ask(text: string): Promise<Record<string, unknown>[]> {
    const client = new Client({ connectionString: server.url() });
    client.on("error", () => {});
    await client.connect();
    try {
      return (await client.query(text)).rows as Record<string, unknown>[];
    } finally {
      await client.end().catch(() => {});
    }
  }

  async function crash(how: Crash): Promise<void> {
    if (how !== "a killed backend")
      return server.restart(how === "an orderly restart" ? "fast" : "immediate");
    await killBackend(server.url());
  }

  /** Somebody else commits until the id has been given out once more. */
  async function reuse(id: string): Promise<void> {
    const before = `SELECT pg_current_xact_id()::text::bigint <= ${id} AS again`;
    for (let again = true; again;) {
      await ask("INSERT INTO noise VALUES (1)");
      again = (await ask(before))[0]?.["again"] === true;
    }
    // Else the test would show nothing.
    expect(await ask(`SELECT pg_xact_status('${id}') AS status`)).toEqual([{ status: "committed" }]);
  }

  /** Runs a call whose COMMIT meets `fate`, and then a crash, and then `meanwhile`; resolves to what it answered. */
  async function meet(
    fate: "hold" | "drop-answer",
    how: Crash,
    meanwhile: (id: string) => Promise<void>,
    call: (hf: Holdfast<unknown>, started: (id: string) => void) => Promise<unknown>,
  ): Promise<unknown> {
    const pool = new Pool({ connectionString: proxy.url(server.url()), max: 3 });
    pool.on("error", () => {});
    let id: string | undefined;
    let met!: () => void;
    const meeting = new Promise<void>((resolve) => (met = resolve));
    let answered = false;
    proxy.cutWhen((direction, chunk) => {
      if (id === undefined || answered) return "pass";
      if (fate === "drop-answer" && direction === "to-client") {
        // It is done, and the answer is on its way.
        if (!chunk.includes("COMMIT")) return "pass";
      } else if (fate !== "hold" || direction !== "to-server" || !chunk.includes("COMMIT")) return "pass";
      answered = true;
      met();
      return "hold";
    });
    try {
      const hf: Holdfast<unknown> = holdfast(fromPg(pool));
      await hf.capabilities();
      const running = call(hf, (started) => (id ??= started)).catch((error: unknown) => error);
      await meeting;
      await crash(how);
      await meanwhile(id as unknown as string);
      proxy.cut();
      proxy.thaw();
      return await running;
    } finally {
      proxy.cutWhen(undefined);
      proxy.thaw();
      await pool.end();
    }
  }

  const nothing = async () => {};
  const insert = (who: string) => async (hf: Holdfast<unknown>, started: (id: string) => void) =>
    hf.transaction({ lock: key("crash"), retry: false }, async (tx) => {
      await tx.query(sql`INSERT INTO effect VALUES (${who})`);
      const [row] = await tx.query(sql`SELECT pg_current_xact_id()::text AS id`);
      started(String(row?.["id"]));
      return "kept";
    });
  const effects = async (who: string) => (await ask(`SELECT FROM effect WHERE who = '${who}'`)).length;

  describe.each<Crash>(["an immediate restart", "a killed backend"])("%s", (how) => {
    test("nothing is reported that somebody else has done", { timeout: 300_000 }, async ({ skip }) => {
      skip(why !== undefined, why);
      for (let round = 1; round <= rounds; round++) {
        const who = `${how}, lost, ${round}`;
        expect(await meet("hold", how, reuse, insert(who))).toMatchObject({ code: "HF_COMMIT_UNKNOWN" });
        expect(await effects(who)).toBe(0);
      }
    });

    test("what nobody has done since was not kept, and can be done again", async ({ skip }) => {
      skip(why !== undefined, why);
      const who = `${how}, unused`;
      expect(await meet("hold", how, nothing, insert(who))).toMatchObject({
        code: "HF_CONNECTION_LOST",
        retryable: true,
      });
      expect(await effects(who)).toBe(0);
    });

    test("what was kept is not said to be lost", async ({ skip }) => {
      skip(why !== undefined, why);
      const who = `${how}, kept`;
      expect(await meet("drop-answer", how, nothing, insert(who))).toMatchObject({
        code: "HF_COMMIT_UNKNOWN",
      });
      expect(await effects(who)).toBe(1);
    });

    test.for(["hold", "drop-answer"] as const)("once knows by its record: %s", async (fate, { skip }) => {
      skip(why !== undefined, why);
      const who = `${how}, once, ${fate}`;
      let runs = 0;
      const call = (hf: Holdfast<unknown>, started: (id: string) => void) =>
        hf.migrate().then(() =>
          once(hf, who, async (tx) => {
            runs++;
            await tx.query(sql`INSERT INTO effect VALUES (${who})`);
            const [row] = await tx.query(sql`SELECT pg_current_xact_id()::text AS id`);
            started(String(row?.["id"]));
          }),
        );
      const answer = await meet(fate, how, fate === "hold" ? reuse : nothing, call);
      expect(answer).toMatchObject({ status: "done", replayed: false });
      expect(runs).toBe(fate === "hold" ? 2 : 1);
      expect(await effects(who)).toBe(1);
    });
  });

  test("an orderly restart is no crash", async ({ skip }) => {
    skip(why !== undefined, why);
    expect(await meet("drop-answer", "an orderly restart", nothing, insert("orderly"))).toBe("kept");
    expect(await effects("orderly")).toBe(1);
  });
});

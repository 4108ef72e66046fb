/**
 * Every verb of the command under bad circumstances: its exit code and its first line, as docs/command-answers.md has them.
 * `HOLDFAST_WRITE_DOCS=1 vitest run test/command-table.test.ts` writes it anew.
 */
import { execFile } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { queue } from "holdfast/queue";
import { quota } from "holdfast/quota";
import { schedule } from "holdfast/schedule";
import { stock } from "holdfast/stock";
import { Client, Pool } from "pg";
import { format } from "prettier";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { program } from "../packages/cli/src/program.ts";
import { type Answer, type Answers, type Call, startAnswers } from "./harness/answers.ts";
import { bin, environment, root, start } from "./harness/command.ts";
import { eventually } from "./harness/wait.ts";

/** What each verb is given: enough to do something, and quickly. With `--yes` where it would ask. */
const given: Readonly<Record<string, string | readonly string[]>> = {
  demo: "--only last-item",
  choose: "--what limit --long statements --database postgres",
  doctor: "--only waits idle-holders version connections",
  certify: "--list",
  race: "test/races/command/quota.ts --only locked",
  order: "test/harness/fixtures/order.jsonl",
  locks: "",
  top: "",
  kill: "2147483647 --yes",
  lease: "",
  "lease show": "export",
  "lease end": "nosuch --yes",
  exec: "--lock a -- true",
  hold: "a",
  keys: "a:b",
  bench: "locks --list",
  migrate: "--yes",
  "migrate status": "",
  "migrate print": "--engine postgres",
  "migrate grants": "--engine postgres --role app",
  strategy: "",
  "strategy set": ["transaction advisory", "--yes"],
  queue: "",
  "queue show": "emails",
  "queue jobs": "emails",
  "queue job": "emails 1",
  "queue retry": "emails 1 --yes",
  "queue discard": "emails 999 --yes",
  "queue prune": "emails --before 1d --yes",
  "queue pause": "emails --yes",
  "queue resume": "emails --yes",
  import: "pg-boss --dry-run",
  schedule: "",
  "schedule show": "report",
  "schedule pause": "report --yes",
  "schedule resume": "report --yes",
  quota: "",
  "quota show": "units ada",
  "quota history": "units ada",
  "quota grant": "units ada 5 --yes",
  "quota grants": "units ada",
  "quota revoke": "units ada nosuch --yes",
  "quota limit": "units ada 50 --yes",
  "quota plan": "units ada gold --yes",
  "quota reset": "units ada --yes",
  "quota refund": "units ada nosuch --yes",
  "quota reconcile": "units",
  stock: "",
  "stock history": "CAP",
  "stock adjust": "CAP 5 --yes",
  "stock add": "CAP 1 --yes",
  "stock take": "CAP 1 --yes",
  "stock reconcile": "CAP",
  "stock channels": "CAP",
  audit: "",
  completion: "bash",
};

/** Those that take seconds if all is well: their own tests have them. */
const slow = new Set(["demo", "race"]);
/** Those that need no database as they are called here. */
const alone = new Set([
  "choose",
  "certify",
  "order",
  "top",
  "keys",
  "bench",
  "migrate print",
  "migrate grants",
  "completion",
]);

type Command = typeof program;

function verbsBelow(command: Command, path: readonly string[] = []): string[] {
  return command
    .createHelp()
    .visibleCommands(command)
    .filter((each) => each.name() !== "help")
    .flatMap((each) => {
      const own = [...path, each.name()];
      return [own.join(" "), ...verbsBelow(each, own)];
    });
}
const verbs = verbsBelow(program);
const commandOf = (verb: string): Command =>
  verb
    .split(" ")
    .reduce<Command>((at, name) => at.commands.find((each) => each.name() === name) as Command, program);

test("every verb has something to be called with", () => {
  expect(Object.keys(given).toSorted()).toEqual(verbs.toSorted());
});

function words(verb: string): string[] {
  const rest = given[verb] ?? [];
  return [...verb.split(" "), ...(typeof rest === "string" ? rest.split(" ") : rest)].filter(
    (word) => word !== "",
  );
}

/** Names, values and keys of somebody who means no good, or of somebody's cat. */
const hostile: Readonly<Record<string, string>> = {
  quotes: `it's "quoted" \`so\` \\ $(touch /tmp/holdfast-was-here) ; DROP TABLE x; --`,
  "a line that ends": "a\nb\r\nc\u2028d",
  escapes: "\u001b[31mred\u001b[0m\u001b]0;title\u0007\u009b2J\u202egnp.exe",
  "10 kB": "x".repeat(10_000),
  "two dashes": "--",
  nothing: "",
  emoji: "👩‍👩‍👧‍👦 ñ \ud800",
};
const huge = "99999999999999999999";

let server: EmbeddedPostgres;
let admin: Client;
let answers: Answers;
const urlOf = (user: string): string => server.url("shop", { user, password: user });

beforeAll(async () => {
  // Of its own: roles belong to a whole server, and pids and addresses do not matter.
  server = await startPostgres({ settings: { fsync: "off", log_lock_waits: "on" } });
  await server.createDatabase("shop");
  const pool = new Pool({ connectionString: server.url("shop") });
  const hf = holdfast(fromPg(pool));
  await hf.migrate();
  await queue(hf, "emails").enqueue({ to: "ada" });
  await quota(hf, { name: "units", limit: 100 }).consume("ada", 7);
  await stock(hf).increase("CAP", 50);
  const report = schedule(hf, "report", { every: "1 hour" }, () => {});
  await report.start();
  await report.stop();
  await hf.close();
  await pool.end();
  admin = new Client({ connectionString: server.url("shop") });
  await admin.connect();
  await admin.query(`
    CREATE ROLE all_the_rights LOGIN PASSWORD 'all_the_rights' SUPERUSER;
    CREATE ROLE no_rights LOGIN PASSWORD 'no_rights';
    REVOKE CREATE ON SCHEMA public FROM PUBLIC;
    CREATE ROLE no_more LOGIN PASSWORD 'no_more' CONNECTION LIMIT 0;
    CREATE ROLE one_left LOGIN PASSWORD 'one_left' CONNECTION LIMIT 1 CREATEDB;
    GRANT pg_monitor TO one_left;
    GRANT ALL ON SCHEMA holdfast TO one_left;
    GRANT ALL ON ALL TABLES IN SCHEMA holdfast TO one_left;
    GRANT ALL ON ALL SEQUENCES IN SCHEMA holdfast TO one_left`);
  answers = await startAnswers();
});

afterAll(async () => {
  await answers?.[Symbol.asyncDispose]();
  await admin?.end();
  await server?.stop();
});

interface Told {
  readonly verb: string;
  readonly code: number | null;
  readonly line: string;
}

/** What differs from run to run, and what would not fit in a table. */
function plain(line: string): string {
  const same = line
    .replaceAll(/postgres:\/\/[^\s,;]*?\/(?:shop|postgres)\b/g, "postgres://…/shop")
    .replaceAll(root, "")
    .replaceAll(/\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d/g, "2026-01-01 12:00:00")
    .replaceAll(/\b\d+(?= (?:ms|s|min)\b)/g, "5")
    .replace(/^PostgreSQL [\d.]+/, "PostgreSQL 18")
    .replace(/\d+ migrations and \d+ routines/, "… migrations and … routines")
    .replaceAll(/holdfast_(?:demo|race|bench)_\w+/g, "holdfast_…")
    .replaceAll(/x{50,}/g, "xxx…");
  return same.length > 150 ? `${same.slice(0, 149)}…` : same;
}

// oxlint-disable-next-line no-control-regex -- it is what must not be there.
const raw = /[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]/;

/** What no answer may be, whatever the circumstances. */
function check(verb: string, args: readonly string[], { code, out, err }: Answer, unread: boolean): Told {
  const about = `${args.join(" ").slice(0, 300)}\n${out.slice(0, 2000)}\n${err.slice(0, 2000)}`;
  expect(code, about).not.toBeNull();
  expect([0, 1, 2], about).toContain(code);
  expect(err, about).not.toMatch(/^\s+at .*:\d+:\d+\)?$/m);
  // As drivers and servers say it, who do not know what was asked.
  expect(err, about).not.toMatch(
    /out of range for type|invalid input syntax|invalid byte sequence|syntax error/,
  );
  expect(out.replaceAll("\t", " "), about).not.toMatch(raw);
  expect(err.replaceAll("\t", " "), about).not.toMatch(raw);
  const failed = code !== null && code >= 2;
  const text = failed || unread || out.trim() === "" ? err : out;
  // Remarks may come before the reason.
  const line = text.split("\n").find((each) => (failed ? /^(?:holdfast|error): \S/ : /\S/).test(each)) ?? "";
  if (failed || !unread) expect(line, about).not.toBe("");
  return { verb, code, line: plain(line) };
}

async function told(
  verb: string,
  args: readonly string[],
  how: Omit<Call, "args" | "env"> & { readonly user?: string; readonly by?: Answers } = {},
): Promise<Told> {
  const { user = "all_the_rights", by = answers, ...rest } = how;
  const env: Record<string, string> = { DATABASE_URL: urlOf(user) };
  // The only one that does not look at the environment.
  const all = verb === "demo" ? [...args, "--url", urlOf(user)] : args;
  return check(verb, args, await by.ask({ ...rest, args: all, env }), by !== answers);
}

const sections: { title: string; about: string; told: Told[] }[] = [];

async function each(
  title: string,
  about: string,
  which: readonly string[],
  ask: (verb: string) => Promise<Told | Told[]>,
): Promise<Told[]> {
  const all: Told[] = [];
  for (const verb of which) all.push(...[await ask(verb)].flat());
  sections.push({ title, about, told: all });
  return all;
}

const quick = verbs.filter((verb) => !slow.has(verb));
const onServer = quick.filter((verb) => !alone.has(verb));

describe("every verb", { timeout: 300_000 }, () => {
  test("an option that is none", async () => {
    const all = await each(
      "An option that is none",
      "An option that no verb has, before all else.",
      verbs,
      (verb) =>
        told(verb, [...verb.split(" "), "--no-such-option", ...words(verb).slice(verb.split(" ").length)]),
    );
    expect(all.filter(({ code }) => code !== 2)).toEqual([]);
  });

  test("no rights", async () => {
    await each(
      "No rights",
      "A role that may connect, and has no right in the schema of Holdfast.",
      [...onServer, ...slow],
      (verb) => told(verb, words(verb), { user: "no_rights" }),
    );
  });

  test("one connection left", async () => {
    const all = await each(
      "One connection left",
      "A role whose limit is one connection.",
      onServer,
      async (verb) => {
        // The one of the verb before.
        await eventually(async () => {
          const { rows } = await admin.query("SELECT FROM pg_stat_activity WHERE usename = 'one_left'");
          return rows.length === 0;
        });
        return told(verb, words(verb), { user: "one_left" });
      },
    );
    // A lock of a session has a connection of its own, and those who look after it another one.
    const more = all.filter(({ line }) => /too many connections/.test(line)).map(({ verb }) => verb);
    expect(more).toEqual(["exec", "hold"]);
  });

  test("no connection left", async () => {
    const all = await each(
      "No connection left",
      "A role whose connections are all in use.",
      [...onServer, ...slow],
      (verb) => told(verb, words(verb), { user: "no_more" }),
    );
    expect(all.filter(({ code, line }) => code !== 2 || !/too many connections/.test(line))).toEqual([]);
  });

  test("nobody to answer a question", async () => {
    await each(
      "No terminal",
      "Without `--yes`, and nobody who could be asked.",
      onServer.filter((verb) => words(verb).includes("--yes")),
      (verb) =>
        told(
          verb,
          words(verb).filter((word) => word !== "--yes"),
        ),
    );
  });

  test("a pipe that nobody reads", async () => {
    await using unread = await startAnswers({ unread: true });
    await each(
      "A pipe that nobody reads",
      "Standard output is a pipe whose reader has gone, as after `| head`. The line is what is on standard error.",
      quick,
      (verb) => told(verb, words(verb), { by: unread }),
    );
    // All of it was done.
    const { rows } = await admin.query("SELECT DISTINCT action FROM holdfast.audit WHERE outcome = 'done'");
    expect(rows.map(({ action }) => String(action))).toEqual(
      expect.arrayContaining(["queue.pause", "quota.grant", "stock.add", "schedule.resume"]),
    );
  });

  test("a terminal of 60 columns", async () => {
    // Code is there to be copied.
    const code = new Set(["choose", "keys", "migrate print", "migrate grants", "completion", "doctor"]);
    await each("60 columns", "In a terminal of 60 columns.", quick, async (verb) => {
      const args = words(verb);
      const answer = await answers.ask({ args, env: { DATABASE_URL: urlOf("all_the_rights") }, columns: 60 });
      // A sentence is folded by the terminal; a table would not be one any more.
      if (!code.has(verb) && answer.out.includes("──"))
        expect(
          answer.out.split("\n").filter((line) => line.length > 60),
          verb,
        ).toEqual([]);
      const answered = check(verb, args, answer, false);
      // Which columns there is room for depends on how long ago something was.
      const [first = ""] = answered.line.split(" ");
      return /[.:]$/.test(answered.line) ? answered : { ...answered, line: `${first} …` };
    });
  });

  test("a number that is too large", async () => {
    const numeric = /<(?:n|ms|id|version|count|seconds|fence)>/;
    const about = `\`${huge}\` for each number in turn. The largest numbers that are taken are tried too.`;
    await each("A number that is too large", about, verbs, async (verb) => {
      const args = words(verb);
      const calls = args.flatMap((word, i) => (/^\d+$/.test(word) ? [args.toSpliced(i, 1, huge)] : []));
      for (const option of commandOf(verb).options)
        if (numeric.test(option.flags) && option.long)
          calls.push([
            ...verb.split(" "),
            ...(option.long === "--places" ? ["--citus"] : []),
            option.long,
            huge,
            ...args.slice(verb.split(" ").length),
          ]);
      const all: Told[] = [];
      for (const call of calls) {
        const at = call.indexOf(huge);
        const name = call[at - 1]?.startsWith("--") ? `${verb} ${call[at - 1]}` : verb;
        all.push({ ...(await told(verb, call)), verb: name });
        if (!slow.has(verb))
          for (const most of [2 ** 31, Number.MAX_SAFE_INTEGER])
            if (!/--(?:seconds|connections|ttl|wait)$/.test(name))
              await told(verb, call.toSpliced(at, 1, String(most)));
      }
      return all;
    });
  });

  test("hostile strings", async () => {
    const all: Told[] = [];
    for (const verb of quick) {
      const from = verb.split(" ").length;
      const args = words(verb);
      const places = args.flatMap((word, i) => (i >= from && /^[a-z][a-z:.-]*$/i.test(word) ? [i] : []));
      for (const [kind, text] of Object.entries(hostile))
        for (const i of places) {
          // What exec runs is a file's name.
          if (verb === "exec" && i === args.length - 1) continue;
          const call = args.toSpliced(i, 1, text);
          const answer = await told(verb, call);
          if (i === places[0] && (kind === "quotes" || kind === "escapes"))
            all.push({ ...answer, verb: `${verb}, ${kind}` });
        }
      // A name of Holdfast's tables that is none.
      if (!alone.has(verb)) {
        const schema = await told(verb, [
          ...args.slice(0, from),
          "--schema",
          hostile["quotes"] ?? "",
          ...args.slice(from),
        ]);
        expect(schema.code, verb).toBe(2);
      }
    }
    sections.push({
      title: "Hostile names",
      about:
        "Quotes, backticks, `$(…)` and SQL; escapes that a terminal would obey. Line ends, 10 kB, `--`, nothing and half an emoji are tried too.",
      told: all,
    });
  });
});

describe("in processes of their own", () => {
  const env = () => ({ DATABASE_URL: urlOf("all_the_rights") });

  test("kill ends all of them, though nobody reads of it", async () => {
    const victims = await Promise.all(
      Array.from({ length: 4 }, async () => {
        const client = new Client({ connectionString: urlOf("all_the_rights") });
        client.on("error", () => {});
        await client.connect();
        await client.query("BEGIN");
        const { rows } = await client.query("SELECT pg_backend_pid() AS pid");
        return Number(rows[0].pid);
      }),
    );
    for (const both of [false, true]) {
      const some = victims.splice(0, 2);
      const { child, done } = start(["kill", ...some.map(String), "--yes"], { env: env() });
      child.stdout.destroy();
      if (both) child.stderr.destroy();
      const { code, err } = await done;
      expect(err).not.toMatch(/^\s+at /m);
      expect(code).toBe(0);
      const { rows } = await admin.query("SELECT FROM pg_stat_activity WHERE pid = ANY ($1::int[])", [some]);
      expect(rows).toEqual([]);
    }
  });

  test("a disk that is full is told, with 2", async ({ skip }) => {
    skip(!existsSync("/dev/full"), "this system has no /dev/full");
    for (const json of [[], ["--json"]]) {
      const args = ["migrate", "print", "--engine", "postgres", ...json];
      const { code, err } = await new Promise<{ code: number; err: string }>((resolve) => {
        execFile(
          "sh",
          ["-c", 'exec "$@" > /dev/full', "sh", process.execPath, ...bin, ...args],
          { env: environment() },
          (error, _, said) => resolve({ code: Number(error?.code ?? 0), err: said }),
        );
      });
      expect([code, err]).toEqual([
        2,
        expect.stringMatching(/^holdfast: Could not write all of the output: .*ENOSPC.*\n$/),
      ]);
    }
  });
});

test("docs/command-answers.md has them", async () => {
  const file = `${root}docs/command-answers.md`;
  const mark = "<!-- generated: answers -->";
  const [before = ""] = readFileSync(file, "utf8").split(mark);
  const text = sections.map(({ title, about, told: all }) => {
    const rows = [...Map.groupBy(all, ({ code, line }) => `${code}\n${line}`).values()].map((alike) => {
      const [first] = alike;
      const code = (line: string) => (line === "" ? "" : `<code>${escaped(line)}</code>`);
      return `| ${first?.code} | ${code(first?.line ?? "")} | ${[...new Set(alike.map(({ verb }) => verb))].join("; ")} |`;
    });
    return [
      `## ${title}`,
      "",
      about,
      "",
      "| exit code | first line | verbs |",
      "| --- | --- | --- |",
      ...rows,
    ].join("\n");
  });
  const wanted = await format(`${before}${mark}\n\n${text.join("\n\n")}\n`, {
    parser: "markdown",
    printWidth: 110,
  });
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") writeFileSync(file, wanted);
  expect(readFileSync(file, "utf8")).toBe(wanted);
});

/** As text between tags, in a cell. */
function escaped(line: string): string {
  return line
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll("|", "&#124;")
    .replaceAll("\\", "&#92;")
    .replaceAll("`", "&#96;")
    .replaceAll("*", "&#42;")
    .replaceAll("_", "&#95;")
    .replaceAll("{", "&#123;")
    .replaceAll("$", "&#36;");
}

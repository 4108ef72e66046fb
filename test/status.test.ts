/**
 * The tables of docs/status.md: what was verified, and how. Engines and what they have come from docs/capabilities.md, which is written
 * from what they say themselves; backends from the list that the tests use. `HOLDFAST_WRITE_DOCS=1` writes them anew.
 */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { format } from "prettier";
import { expect, test } from "vitest";
import { type Server, backends } from "./backends.ts";

const root = fileURLToPath(new URL("..", import.meta.url));
const read = (file: string): string => readFileSync(`${root}${file}`, "utf8");

/** By what each row of the features is tried, besides the conformance of every backend. The files are below test/. */
const proofs: readonly (readonly [feature: string, ...how: (readonly [kind: string, file: string])[]])[] = [
  [
    "`hf.transaction({ lock })`",
    ["processes", "transfers.test.ts"],
    ["faults", "faults.test.ts"],
    ["histories, killed", "history-locks.test.ts"],
    ["mutants", "mutants.test.ts"],
  ],
  ["`hf.join`", ["traps", "traps.test.ts"]],
  ["`hf.hold`", ["poolers", "poolers.test.ts"]],
  ["`shared(key)`", ["traps", "traps.test.ts"]],
  ["`tx.rows`", ["processes", "transfers.test.ts"], ["traps", "rows.test.ts"]],
  ["`tx.table`", ["traps", "rows.test.ts"]],
  ["`hf.lease`", ["frozen, killed", "leases.test.ts"], ["failover", "failover.test.ts"]],
  ["`versioned`", ["processes", "lost-update.test.ts"]],
  ["`once`", ["processes, killed", "once.test.ts"]],
  [
    "`quota`",
    ["random, killed", "quota-random.test.ts"],
    ["model of windows", "quota-windows.test.ts"],
    ["every client", "quota-adapters.test.ts"],
    ["its views", "entries.test.ts"],
    ["processes", "patterns-processes.test.ts"],
  ],
  [
    "`stock`",
    ["random, killed", "stock-random.test.ts"],
    ["every client", "patterns-adapters.test.ts"],
    ["its views", "entries.test.ts"],
    ["processes", "patterns-processes.test.ts"],
  ],
  [
    "`queue`",
    ["processes, killed", "queue-processes.test.ts"],
    ["faults", "queue-faults.test.ts"],
    ["every client", "patterns-adapters.test.ts"],
  ],
  [
    "`schedule`",
    ["processes, killed", "schedule-processes.test.ts"],
    ["every client", "schedule-adapters.test.ts"],
  ],
  ["`audited`", ["inside a transaction", "patterns-inside.test.ts"]],
  ["`hf.inspect`", ["sessions of others", "inspect.test.ts"], ["MySQL", "inspect-mysql.test.ts"]],
  [
    "a deadline that the server keeps",
    ["frozen", "faults.test.ts"],
    ["MySQL", "server-deadline-mysql.test.ts"],
  ],
  [
    "a lost COMMIT is looked up",
    ["a server that crashes", "crash.test.ts"],
    ["MySQL", "commit-outcome-mysql.test.ts"],
  ],
];

const cells = (line: string): string[] =>
  line
    .split("|")
    .slice(1, -1)
    .map((cell) => cell.trim());
const row = (texts: readonly string[]): string => `| ${texts.join(" | ")} |`;

function features(): string {
  const [, rest = ""] = read("docs/capabilities.md").split("<!-- generated: engines -->");
  const [head = "", , ...lines] = (rest.split("<!-- end -->")[0] ?? "").trim().split("\n");
  const engines = cells(head);
  const body = lines.map((line) => {
    const [feature = "", ...told] = cells(line);
    const [, ...how] = proofs.find(([name]) => feature.startsWith(name)) ?? [];
    expect(how.length, `how ${feature} was verified`).toBeGreaterThan(0);
    const links = how.map(([kind, file]) => `[${kind}](../test/${file})`);
    return row([feature, ...told, ["[conformance](../test/conformance)", ...links].join(", ")]);
  });
  expect(body).toHaveLength(proofs.length);
  return [row([...engines, "how it was verified"]), row([...engines, ""].map(() => "---")), ...body].join(
    "\n",
  );
}

const servers: Readonly<Record<Server, string>> = {
  postgres: "PostgreSQL 18",
  postgresOld: "a PostgreSQL before 17",
  pgbouncer: "PostgreSQL behind PgBouncer, in transaction mode",
  mariadb: "MariaDB",
  mysql: "MySQL",
  file: "a file: SQLite, libSQL",
  process: "within the process: DuckDB, PGlite",
};

function backendsByServer(): string {
  const lines = (Object.keys(servers) as Server[]).map((server) => {
    const own = backends.filter((backend) => backend.server === server);
    expect(own, server).not.toEqual([]);
    const names = own.map(({ name, manyProcesses }) => `${name}${manyProcesses ? "" : " (one process)"}`);
    return row([servers[server], names.join("; ")]);
  });
  return [row(["server", "backends"]), row(["---", "---"]), ...lines].join("\n");
}

test("docs/status.md says what is verified, and how", async () => {
  for (const [feature, ...how] of proofs)
    for (const [, file] of how) expect(existsSync(`${root}test/${file}`), `${feature}: ${file}`).toBe(true);
  let text = read("docs/status.md");
  for (const [mark, generated] of [
    ["status", features()],
    ["backends", backendsByServer()],
  ] as const) {
    const [before = "", rest] = text.split(`<!-- generated: ${mark} -->`);
    expect(rest, mark).toBeDefined();
    const after = rest?.slice(rest.indexOf("<!-- end -->"));
    text = `${before}<!-- generated: ${mark} -->\n\n${generated}\n\n${after}`;
  }
  const wanted = await format(text, { parser: "markdown", printWidth: 110, proseWrap: "preserve" });
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") writeFileSync(`${root}docs/status.md`, wanted);
  else expect(read("docs/status.md")).toBe(wanted);
});

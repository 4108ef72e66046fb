/**
 * Runs the scenarios under the explorer, on a PostgreSQL of its own, and writes the schedules that break their rules: what the
 * guides show. `npm run docs:record` writes them all.
 */
import { readdirSync, writeFileSync } from "node:fs";
import { basename } from "node:path";
import { startPostgres } from "@holdfast/cli";
import { fromPg } from "holdfast/pg";
import { explore } from "holdfast/testing";
import { Pool } from "pg";
import type { Scenario } from "./scenarios/scenario.ts";

/** As it is committed, and shown. */
export interface Recorded {
  readonly title: string;
  readonly actors: readonly string[];
  readonly turns: readonly RecordedTurn[];
  readonly anomaly: string;
  /** What the rule said. */
  readonly error: string;
  readonly fix: string;
  /** The same for a terminal, and for the guides in the repository. */
  readonly text: string;
}

export interface RecordedTurn {
  readonly n: number;
  readonly actor: string;
  readonly statement: string;
  readonly result: string;
  readonly waitsFor: readonly string[];
  readonly error?: string;
  readonly switched: boolean;
  readonly stale: boolean;
}

const scenarios = new URL("scenarios/", import.meta.url);

export const names: readonly string[] = readdirSync(scenarios)
  .map((file) => basename(file, ".ts"))
  .filter((name) => name !== "scenario");

const words = (error: unknown) => (error instanceof Error ? error.message : String(error));

/** In a database that has none of its tables yet. */
export async function record(name: string, url: string): Promise<Recorded> {
  const { scenario }: { scenario: Scenario } = await import(new URL(`${name}.ts`, scenarios).href);
  const pool = new Pool({ connectionString: url, max: 8 });
  try {
    await pool.query(scenario.tables);
    const report = await explore(name, {
      db: fromPg(pool),
      reset: () => pool.query(scenario.rows),
      actors: scenario.actors(pool),
      invariant: (results) =>
        scenario.invariant(
          pool,
          Object.values(results).flatMap((result) =>
            result.status === "rejected" ? [words(result.reason)] : [],
          ),
        ),
      maxMs: 60_000,
    });
    if (report.ok) throw new Error(`${name}: no order breaks the rule\n${report.text}`);
    return {
      title: scenario.title,
      actors: report.actors ?? [],
      turns: (report.turns ?? []).map(({ n, actor, statement, rows, waitsFor, error, switched, stale }) => ({
        n,
        actor,
        statement,
        result: rows.map((row) => row.join(", ")).join(" | "),
        waitsFor,
        ...(error === undefined ? {} : { error }),
        switched,
        stale,
      })),
      anomaly: report.anomaly ?? "",
      error: words(report.error),
      fix: report.fix ?? "",
      text: plain(report.text, report.fix ?? ""),
    };
  } finally {
    await pool.end();
  }
}

/** The schedule and what the rule said of it, without places in files, which change with every line that is added there. */
const plain = (text: string, fix: string) =>
  text
    .split("\n")
    .slice(1)
    .filter((line) => !line.startsWith("Replay: ") && (fix === "" || !line.includes(fix)))
    .map((line) => line.replace(/ {2}[\w-]+\.ts:\d+(:\d+)?$/, "").trimEnd())
    .join("\n");

if (import.meta.main) {
  const server = await startPostgres();
  try {
    for (const name of names) {
      const database = name.replaceAll("-", "_");
      await server.createDatabase(database);
      const recorded = await record(name, server.url(database));
      writeFileSync(
        new URL(`schedules/${name}.json`, import.meta.url),
        `${JSON.stringify(recorded, undefined, 2)}\n`,
      );
      console.log(recorded.text);
    }
  } finally {
    await server.stop();
  }
}

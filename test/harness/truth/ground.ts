/** What the explorer and the brute force need of an engine to run programs on it. */
import type { Scenario, ThreadScenario } from "holdfast/testing";
import type { ActorProgram, Program, Value } from "./program.ts";
import type { Site } from "./stepper.ts";

export interface Ground extends Site {
  readonly db?: Scenario["db"];
  actor(program: ActorProgram): Scenario["actors"][string] | ThreadScenario["actors"][string];
  close(): Promise<void>;
}

export const resetText = ({ tables, rows }: Program): string =>
  [...tables.map((each) => `DELETE FROM ${each}`), ...rows].join("; ");

/** Numbers of sequences are not a part of it. */
const columns: Readonly<Record<string, string>> = {
  t: "id, n",
  u: "id, n",
  l: "v, 0",
  f: "t, 0",
  g: "v, 0",
  e: "b, 0",
  d: "v, b",
  c: "b, 0",
  p: "b, 0",
  q: "b, 0",
};

export const rowsText = ({ tables }: Program): string =>
  tables.map((each) => `SELECT '${each}', ${columns[each]} FROM ${each}`).join(" UNION ALL ") || "SELECT 1";

/** As text: drivers differ in what they count with. */
export const valuesOf = (rows: readonly (readonly unknown[])[]): Value[][] =>
  rows.map((row) => row.map((value) => (value === null || value === "" ? null : String(value))));

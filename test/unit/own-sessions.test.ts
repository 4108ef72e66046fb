/** The experiment that tells sessions of one's own from those that a pooler lends out, with poolers that are hard to catch. */
import { setTimeout as sleep } from "node:timers/promises";
import { UnsupportedError } from "holdfast";
import { expect, test } from "vitest";
import { verifySessions } from "../../packages/holdfast/src/engines/postgres/probe.ts";
import type { SqlConnection } from "../../packages/holdfast/src/seam/database.ts";

type Lend = (idle: number[]) => number | undefined;

/** Two connections, and sessions that are lent to them for a statement or a transaction, and taken back so many milliseconds later. */
function lending(lend: Lend, backMs: number): [SqlConnection, SqlConnection] {
  const idle = [1, 2];
  let made = 2;
  const connect = () => {
    let held: number | undefined;
    // One connection's next statement comes after its session was taken back.
    let back = Promise.resolve();
    const query = async ({ parts: [text = ""] }: { parts: readonly string[] }) => {
      await back;
      const session = (held ??= lend(idle) ?? ++made);
      if (text !== "BEGIN" && (text === "ROLLBACK" || !inside)) {
        inside = false;
        held = undefined;
        const taken = backMs === 0 ? Promise.resolve() : sleep(backMs);
        const done = taken.then(() => void idle.push(session));
        if (backMs === 0) await done;
        else back = done;
      } else inside = true;
      return { rows: [{ pid: session, peer: "" }] };
    };
    let inside = false;
    return { query } as unknown as SqlConnection;
  };
  return [connect(), connect()];
}

const ways: Readonly<Record<string, Lend>> = {
  "the last one first": (idle) => idle.pop(),
  "in turn": (idle) => idle.shift(),
};

for (const [how, lend] of Object.entries(ways))
  for (const backMs of [0, 2])
    test(`${how}, taken back after ${backMs} ms: nobody believes to have one`, async () => {
      for (let i = 0; i < 20; i++)
        await expect(verifySessions(...lending(lend, backMs))).rejects.toBeInstanceOf(UnsupportedError);
    });

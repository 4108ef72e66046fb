/** Times cannot be asserted, but counts can: no call may cost more than the committed table says. */
import { describe, expect, test } from "vitest";
import { missing, placeFor } from "../harness/places.ts";
import { type Cost, type Measured, compare, costNames, updated } from "./cost.ts";
import { clients, measure, serverOf } from "./measuring.ts";
import { formatted, parsed, readTable } from "./table.ts";

// It takes seconds, and 70 of them have been seen on a machine with ten times as much to do as it has processors.
const timeout = 300_000;

test.concurrent.for(clients)(
  "no call costs more than the table says: %s",
  { timeout },
  async (client, { skip }) => {
    const backend = { server: serverOf(client) };
    skip(missing(backend) !== undefined, missing(backend));
    const table = await readTable();
    const place = await placeFor(backend);
    try {
      const { rises, drops } = compare(client, table.get(client), await measure(client, place.url));
      for (const drop of drops) console.log(drop);
      if (drops.length > 0) console.log("To hold the lower figures: npm run cost -- --update");
      expect(rises, "If this is meant: npm run cost -- --update").toEqual([]);
    } finally {
      await place.drop();
    }
  },
);

describe("the table", () => {
  const all = (figure: number) => Object.fromEntries(costNames.map((name) => [name, figure])) as Cost;
  const one = (cost: Partial<Cost>): Measured => new Map([["hf.call", { ...all(0), ...cost }]]);

  test("has the clients that are measured, and no others", async () => {
    expect([...(await readTable()).keys()]).toEqual(clients);
  });

  test("is read as it was written", async () => {
    const table = await readTable();
    expect(parsed(formatted(table))).toEqual(table);
  });

  test("names the client, the call, the figure and both values of a rise", () => {
    const before = one({ promises: 10, bytesSent: 1000, bytesAllocated: 100_000 });
    expect(compare("pg", before, one({ promises: 11, bytesSent: 1020, bytesAllocated: 125_000 }))).toEqual({
      rises: ["pg: hf.call: promises rose from 10 to 11"],
      drops: [],
    });
    expect(compare("pg", before, one({ promises: 9, bytesSent: 1021, bytesAllocated: 125_001 }))).toEqual({
      rises: [
        "pg: hf.call: bytes sent rose from 1000 to 1021 (tolerance 20)",
        "pg: hf.call: bytes allocated rose from 100000 to 125001 (tolerance 25000)",
      ],
      drops: ["pg: hf.call: promises fell from 10 to 9"],
    });
  });

  test("and the measurement must have the same calls", () => {
    const [call, other] = [one({}), new Map([["hf.other", all(0)]])];
    expect(compare("pg", undefined, call).rises).toHaveLength(1);
    expect(compare("pg", call, other).rises).toHaveLength(2);
  });

  test("keeps figures that are within their tolerance when it is updated", () => {
    const before = one({ promises: 10, bytesSent: 1000, bytesAllocated: 100_000 });
    const now = one({ promises: 9, bytesSent: 1010, bytesAllocated: 70_000 });
    expect(updated(before, now)).toEqual(one({ promises: 9, bytesSent: 1000, bytesAllocated: 70_000 }));
    expect(updated(undefined, now)).toEqual(now);
  });
});

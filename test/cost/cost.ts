interface CostKind {
  readonly title: string;
  /** A figure may differ from the committed one by this share of it, and by this much in any case. Without them it may not. */
  readonly share?: number;
  readonly least?: number;
}

/** What a call costs. */
export const costs = {
  roundTrips: { title: "round trips" },
  messages: { title: "messages" },
  statements: { title: "statements" },
  // Times and numbers are sent as text, with as many digits as they have.
  bytesSent: { title: "bytes sent", share: 0.02, least: 16 },
  bytesReceived: { title: "bytes received", share: 0.02, least: 16 },
  promises: { title: "promises" },
  timers: { title: "timers" },
  abortControllers: { title: "abort controllers" },
  // The compiler leaves out some allocations, and not the same ones each time. On a busy machine more goes on beside the call.
  bytesAllocated: { title: "bytes allocated", share: 0.25, least: 2000 },
} satisfies Record<string, CostKind>;

export type CostName = keyof typeof costs;
export type Cost = Readonly<Record<CostName, number>>;
export type CountName = Exclude<CostName, "bytesAllocated">;
export type Counts = Record<CountName, number>;

export const costNames = Object.keys(costs) as CostName[];
export const countNames = costNames.filter((name) => name !== "bytesAllocated");

/** By the name of the call. */
export type Measured = ReadonlyMap<string, Cost>;

/** How far a figure may be from the committed one. */
export function toleranceOf(name: CostName, committed: number): number {
  const { share = 0, least = 0 }: CostKind = costs[name];
  return Math.max(Math.round(share * committed), least);
}

export interface Comparison {
  /** One line for each figure that is too high, and for each call that only the table or only the measurement has. */
  readonly rises: readonly string[];
  /** One line for each figure that is lower than the table says. */
  readonly drops: readonly string[];
}

export function compare(client: string, committed: Measured | undefined, measured: Measured): Comparison {
  if (!committed) return { rises: [`${client}: the table does not have this client`], drops: [] };
  const rises: string[] = [];
  const drops: string[] = [];
  for (const [call, cost] of measured) {
    const before = committed.get(call);
    if (!before) {
      rises.push(`${client}: ${call}: the table does not have this call`);
      continue;
    }
    for (const name of costNames) {
      const [was, is] = [before[name], cost[name]];
      const tolerance = toleranceOf(name, was);
      if (Math.abs(is - was) <= tolerance) continue;
      const about = `${client}: ${call}: ${costs[name].title}`;
      const limit = tolerance === 0 ? "" : ` (tolerance ${tolerance})`;
      if (is > was) rises.push(`${about} rose from ${was} to ${is}${limit}`);
      else drops.push(`${about} fell from ${was} to ${is}${limit}`);
    }
  }
  for (const call of committed.keys())
    if (!measured.has(call))
      rises.push(`${client}: ${call}: the table has this call, and it was not measured`);
  return { rises, drops };
}

/** What the table says from now on: a figure that is within its tolerance stays, so that a diff shows changes only. */
export function updated(committed: Measured | undefined, measured: Measured): Measured {
  return new Map(
    [...measured].map(([call, cost]) => {
      const before = committed?.get(call);
      const figures = costNames.map((name) => {
        const was = before?.[name];
        const keeps = was !== undefined && Math.abs(cost[name] - was) <= toleranceOf(name, was);
        return [name, keeps ? was : cost[name]] as const;
      });
      return [call, Object.fromEntries(figures) as Cost] as const;
    }),
  );
}

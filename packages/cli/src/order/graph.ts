/** What was seen by several processes, as one graph: who was locked before whom. */

/** As `HOLDFAST_ORDER` has it, one in each line. */
export interface Line {
  readonly from: string;
  readonly to: string;
  /** Keys of one namespace, by their ids. */
  readonly way?: "up" | "down";
  readonly first?: string;
  readonly second?: string;
  readonly pid?: number;
}

export interface Step extends Omit<Line, "pid"> {
  /** How many processes have seen it. */
  readonly processes: number;
}

export interface Order {
  /** In an order that as many steps as possible agree with. */
  readonly locks: readonly string[];
  readonly steps: readonly Step[];
  /** Steps that lead round. */
  readonly inversions: readonly (readonly Step[])[];
}

export function merged(lines: readonly Line[]): Order {
  const found = new Map<string, { readonly line: Line; readonly pids: Set<unknown> }>();
  for (const line of lines) {
    const id = JSON.stringify([line.from, line.to, line.way]);
    const known = found.get(id) ?? { line, pids: new Set() };
    known.pids.add(line.pid);
    found.set(id, known);
  }
  const steps = [...found.values()].map(({ line, pids }): Step => {
    const { pid: _, ...rest } = line;
    return { ...rest, processes: pids.size };
  });
  return { locks: sorted(steps), steps, inversions: [...rounds(steps), ...turns(steps)] };
}

/** The shortest way round for each step that is on one; the same way is told once. */
function rounds(steps: readonly Step[]): Step[][] {
  const next = Map.groupBy(
    steps.filter(({ from, to }) => from !== to),
    ({ from }) => from,
  );
  const told = new Set<string>();
  const found: Step[][] = [];
  for (const step of steps) {
    const back = step.from === step.to ? undefined : path(next, step.to, step.from);
    if (!back) continue;
    const round = [step, ...back];
    const id = JSON.stringify(round.map(({ from }) => from).toSorted());
    if (told.has(id)) continue;
    told.add(id);
    found.push(round);
  }
  return found;
}

function path(next: ReadonlyMap<string, readonly Step[]>, from: string, to: string): Step[] | undefined {
  const came = new Map<string, Step | undefined>([[from, undefined]]);
  const queue = [from];
  for (const each of queue) {
    if (each === to) {
      const steps: Step[] = [];
      for (let by = came.get(to); by; by = came.get(by.from)) steps.unshift(by);
      return steps;
    }
    for (const step of next.get(each) ?? []) {
      if (came.has(step.to)) continue;
      came.set(step.to, step);
      queue.push(step.to);
    }
  }
  return undefined;
}

/** Keys of one namespace that are taken one after the other, in whatever order they come. */
function turns(steps: readonly Step[]): Step[][] {
  const own = Map.groupBy(
    steps.filter(({ way }) => way !== undefined),
    ({ from }) => from,
  );
  return [...own.values()].filter((both) => both.length > 1);
}

/** Those that come after nothing else first; where there is a round, whatever has the fewest before it. */
function sorted(steps: readonly Step[]): string[] {
  const before = new Map<string, Set<string>>();
  for (const { from, to } of steps) {
    if (!before.has(from)) before.set(from, new Set());
    if (!before.has(to)) before.set(to, new Set());
    if (from !== to) before.get(to)?.add(from);
  }
  const locks: string[] = [];
  while (before.size > 0) {
    const [name] = [...before].reduce((best, each) =>
      each[1].size < best[1].size || (each[1].size === best[1].size && each[0] < best[0]) ? each : best,
    );
    locks.push(name);
    before.delete(name);
    for (const others of before.values()) others.delete(name);
  }
  return locks;
}

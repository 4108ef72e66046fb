/** Rooms and shares: how many jobs of a group a claim may begin. */
import { millisecond } from "./draft.ts";
import type { GroupRow, QueueRow } from "./rows.ts";

/**
 * Of a claim of so many, how many are for jobs of groups: half of it, and all that jobs without a group have left. Of one alone, a
 * coin decides.
 */
export function roomForGroups(most: number, found: number, coin: () => boolean): number {
  return Math.max(most - found, most === 1 ? Number(coin()) : Math.floor(most / 2));
}

/** How many jobs of one group go into a claim: up to ten. */
export function shareOf({ group_most }: Pick<QueueRow, "group_most">, room: number): number {
  return Math.max(1, Math.min(10, room, group_most ?? Infinity));
}

export const isLimited = ({ group_most, group_rate }: Pick<QueueRow, "group_most" | "group_rate">): boolean =>
  group_most !== undefined || group_rate !== undefined;

/** What began then, or earlier, is over. */
function windowStart({ group_per }: Pick<QueueRow, "group_per">, moment: number): number | undefined {
  return group_per === undefined ? undefined : moment - group_per * millisecond;
}

export interface GroupRoom {
  readonly group: GroupRow;
  /** How many of its jobs may begin; 0 or less: none. */
  readonly room: number;
  /** The window that they would begin in, and the starts in it so far. */
  readonly since: number;
  readonly used: number;
}

/** Of groups in their order, and so many places for all of them: each has an equal share, as far as its limits allow. */
export function roomsOf(
  queue: Pick<QueueRow, "group_most" | "group_rate" | "group_per">,
  groups: readonly GroupRow[],
  { moment, share, left }: { readonly moment: number; readonly share: number; readonly left: number },
): GroupRoom[] {
  const start = windowStart(queue, moment);
  return groups.map((group, i) => {
    const open = start !== undefined && group.since !== undefined && group.since > start;
    const used = open ? group.started : 0;
    const room = Math.min(
      share,
      left - i * share,
      (queue.group_most ?? Infinity) - group.running,
      (queue.group_rate ?? Infinity) - used,
    );
    return { group, room, used, since: open ? group.since : moment };
  });
}

/**
 * After so many jobs of it have begun: as it is from now on; `forget`: it has none, and nothing that it must remember; undefined: as
 * it was.
 */
export function afterClaim(
  queue: Pick<QueueRow, "group_most" | "group_rate" | "group_per">,
  { group, room, since, used }: GroupRoom,
  begun: number,
  moment: number,
): GroupRow | "forget" | undefined {
  if (begun > 0) {
    if (!isLimited(queue)) return undefined;
    const running = group.running + begun;
    return { ...group, running, since, started: used + begun, next: undefined, head: undefined };
  }
  const start = windowStart(queue, moment);
  const over =
    queue.group_rate === undefined ||
    group.since === undefined ||
    (start !== undefined && group.since <= start);
  return room > 0 && group.running === 0 && over ? "forget" : undefined;
}

/**
 * Milliseconds until the first of them has room again or, if it has no jobs, can be forgotten; undefined: none waits for a moment.
 */
export function roomSoon(
  { group_per }: Pick<QueueRow, "group_per">,
  groups: readonly GroupRow[],
  moment: number,
): number | undefined {
  const waits = groups.flatMap(({ next, since }) => {
    const opens =
      group_per === undefined || since === undefined ? -Infinity : since + group_per * millisecond;
    const at = Math.max(next ?? -Infinity, opens);
    return at > moment ? [(at - moment) / millisecond] : [];
  });
  return waits.length > 0 ? Math.min(...waits) : undefined;
}

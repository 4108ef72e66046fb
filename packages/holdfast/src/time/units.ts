/** Units of time, and periods as people write them: "day", "15 minutes". */

export type Unit = "second" | "minute" | "hour" | "day" | "week" | "month" | "year";

/** In milliseconds: as long as it is, or on average for months and years. */
export const lengths: Readonly<Record<Unit, number>> = {
  second: 1000,
  minute: 60_000,
  hour: 3_600_000,
  day: 86_400_000,
  week: 604_800_000,
  month: 2_629_746_000,
  year: 31_556_952_000,
};

/** 1970-01-01 was a Thursday: the day, counted from there, with which weeks begin. */
export const monday = -3;

export function periodOf(text: unknown): { readonly unit: Unit; readonly count: number } | undefined {
  const [, count = "1", unit] =
    (typeof text === "string" && /^(?:(\d+) )?(second|minute|hour|day|week|month|year)s?$/.exec(text)) || [];
  return unit === undefined ? undefined : { unit: unit as Unit, count: Number(count) };
}

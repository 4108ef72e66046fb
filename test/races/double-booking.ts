import assert from "node:assert/strict";
import type { Prisma, PrismaClient } from "../generated/prisma-races/client.ts";
import { type Race, accepted, number, postgresOnly } from "./race.ts";

interface Booking {
  roomId: number;
  startsAt: number;
  endsAt: number;
  guest: string;
}

async function bookIfFree(tx: Prisma.TransactionClient, booking: Booking): Promise<void> {
  const { roomId, startsAt, endsAt } = booking;
  const taken = await tx.meetingBooking.findFirst({
    where: { roomId, startsAt: { lt: endsAt }, endsAt: { gt: startsAt } },
  });
  if (taken) throw new Error("The room is taken");
  await tx.meetingBooking.create({ data: booking });
}

async function naive(prisma: PrismaClient, booking: Booking): Promise<void> {
  await prisma.$transaction((tx) => bookIfFree(tx, booking));
}

async function fixed(prisma: PrismaClient, booking: Booking): Promise<void> {
  await prisma.$transaction(async (tx) => {
    await tx.$queryRaw`SELECT id FROM meeting_room WHERE id = ${booking.roomId} FOR UPDATE`;
    await bookIfFree(tx, booking);
  });
}

const ada = { roomId: 1, startsAt: 9, endsAt: 11, guest: "Ada" };
const bob = { roomId: 1, startsAt: 10, endsAt: 12, guest: "Bob" };

export const doubleBooking: Race = {
  title: "a room is booked twice",
  source: "cal.com 13397",
  client: "prisma",
  engines: postgresOnly,
  tables: {
    meeting_room: "id int PRIMARY KEY, name text NOT NULL",
    meeting_booking:
      "id serial PRIMARY KEY, room_id int NOT NULL REFERENCES meeting_room, starts_at int NOT NULL, ends_at int NOT NULL, guest text NOT NULL",
  },
  rows: ["INSERT INTO meeting_room VALUES (1, 'Attic')"],
  naive: { actors: ({ prisma }) => ({ A: () => naive(prisma, ada), B: () => naive(prisma, bob) }) },
  fixed: { actors: ({ prisma }) => ({ A: () => fixed(prisma, ada), B: () => fixed(prisma, bob) }) },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM meeting_booking"), 1, "bookings from 10 to 11");
    assert.equal(accepted(results), 1);
  },
  expects: "phantom",
};

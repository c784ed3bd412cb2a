// A replacement scheduler for Fairlead in Go: the endpoint with the lowest expected time to the first token.
//
// go run . -listen 127.0.0.1:9100
package main

import (
	"errors"
	"flag"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "fairlead.dev/examples/scheduler-go/schedulerv1"
)

// pool is what one gateway has told about its endpoints, by slot.
type pool struct {
	endpoints map[uint32]*pb.Endpoint
	// Own picks that the gateway's figures do not include yet: batch number and slot.
	charged []charge
}

type charge struct {
	batch uint64
	slot  uint32
	ms    float64
}

func (p *pool) learn(state *pb.State) {
	if state.Full {
		p.endpoints = map[uint32]*pb.Endpoint{}
	}
	for _, slot := range state.Gone {
		delete(p.endpoints, slot)
	}
	for _, endpoint := range state.Endpoints {
		p.endpoints[endpoint.Slot] = endpoint
	}
	kept := p.charged[:0]
	for _, one := range p.charged {
		if one.batch > state.Settled {
			kept = append(kept, one)
		}
	}
	p.charged = kept
}

// pick takes the endpoint where the request waits least, counting what this batch and the last ones put there.
func (p *pool) pick(batch uint64, request *pb.Request) *pb.Pick {
	ahead := map[uint32]float64{}
	for _, one := range p.charged {
		ahead[one.slot] += one.ms
	}
	var slots []uint32
	if request.Candidates != nil {
		slots = request.Candidates.Slots
	} else {
		for slot := range p.endpoints {
			slots = append(slots, slot)
		}
	}
	var best *pb.Endpoint
	var bestMs float64
	for _, slot := range slots {
		endpoint := p.endpoints[slot]
		if endpoint == nil || request.Forecast == nil || int(slot) >= len(request.Forecast.TtftMs) {
			continue
		}
		ms := request.Forecast.TtftMs[slot] + ahead[slot]
		if best == nil || ms < bestMs {
			best, bestMs = endpoint, ms
		}
	}
	if best == nil {
		return &pb.Pick{Request: request.Id, Outcome: pb.Outcome_OUTCOME_PASSED}
	}
	p.charged = append(p.charged, charge{batch, best.Slot, request.Forecast.PrefillMs[best.Slot]})
	return &pb.Pick{Request: request.Id, Outcome: pb.Outcome_OUTCOME_PICKED, Endpoint: best.Id, Score: -bestMs}
}

type server struct {
	pb.UnimplementedSchedulerServer
}

func (server) Schedule(stream pb.Scheduler_ScheduleServer) error {
	var known pool
	greeted := false
	for {
		ask, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !greeted {
			if ask.Hello.GetVersion() < 1 {
				return status.Error(codes.InvalidArgument, "the first message has no hello with a version")
			}
			welcome := &pb.Welcome{Version: 1, Scheduler: "scheduler-go", Policy: "lowest-ttft", WantsForecasts: true}
			if err := stream.Send(&pb.Answer{Welcome: welcome}); err != nil {
				return err
			}
			greeted = true
		} else if ask.Hello != nil {
			return status.Error(codes.InvalidArgument, "a second hello")
		}
		if ask.State != nil {
			known.learn(ask.State)
		}
		if ask.Batch == nil {
			continue
		}
		picks := &pb.Picks{Batch: ask.Batch.Number}
		for _, request := range ask.Batch.Requests {
			picks.Picks = append(picks.Picks, known.pick(ask.Batch.Number, request))
		}
		if err := stream.Send(&pb.Answer{Picks: picks}); err != nil {
			return err
		}
	}
}

func main() {
	address := flag.String("listen", "127.0.0.1:9100", "host:port or unix:/path")
	flag.Parse()
	network, where := "tcp", *address
	if strings.HasPrefix(where, "unix:") {
		network, where = "unix", strings.TrimPrefix(where, "unix:")
		os.Remove(where)
	}
	listener, err := net.Listen(network, where)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("listening on %s", listener.Addr())
	// Fairlead pings every 5 s. gRPC for Go allows one ping in 5 minutes by default, and ends the connection otherwise.
	serving := grpc.NewServer(grpc.KeepaliveEnforcementPolicy(
		keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
	pb.RegisterSchedulerServer(serving, server{})
	log.Fatal(serving.Serve(listener))
}

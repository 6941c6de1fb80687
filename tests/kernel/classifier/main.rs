//! The program itself, in the kernel: every verdict by test run on real devices, then real packets between namespaces.

mod checksum;
mod errors;
mod flows;
mod frame;
mod gates;
mod headers;
mod model;
mod neighbours;
mod plane;
mod prefixes;
mod probes;
mod values;
mod wire;

holdfast_tests::suite! {
    needs [Namespaces, Object];
    values::the_object_is_what_the_layout_says,
    gates::whoever_is_not_known_passes,
    gates::what_is_not_claimed_passes,
    gates::requests_are_delivered_and_answers_come_back,
    gates::a_closed_row_holds,
    gates::another_token_holds,
    gates::a_closed_entry_holds_its_own_destination_alone,
    gates::held_traffic_passes_where_the_policy_says_so,
    gates::an_empty_set_is_no_producer,
    gates::a_producer_that_is_not_the_programmed_one_is_none,
    gates::another_slot_is_tried_where_one_does_not_serve,
    gates::sources_of_others_are_spoofed,
    headers::f33_what_is_never_captured_passes_also_while_held,
    headers::headers_that_cannot_be_read_do_not_pass,
    headers::later_fragments_follow_their_first,
    headers::packets_without_ports_do_not_get_around_a_claim,
    flows::answers_between_other_incarnations_are_stale,
    flows::requests_of_stale_flows_are_chosen_anew,
    flows::a_new_epoch_looks_every_route_up_again,
    flows::a_switch_moves_new_flows_and_drains_the_others,
    flows::flows_spread_over_all_producers_and_stay,
    flows::a_syn_chooses_anew,
    flows::an_answer_key_has_one_owner,
    flows::an_evicted_answer_entry_is_made_again,
    flows::new_flows_have_a_rate,
    flows::a_flow_gets_another_port_where_its_answers_would_be_anothers,
    flows::ports_are_written_with_their_checksums,
    errors::errors_reach_who_sent_what_they_quote,
    errors::quotes_show_the_port_that_their_reader_knows,
    errors::errors_about_flows_that_are_not_current_are_stale,
    errors::errors_about_nothing_of_ours_pass,
    prefixes::prefixes_take_what_they_cover_of_every_protocol,
    prefixes::the_most_specific_route_wins,
    prefixes::a_prefix_holds_by_its_own_gates,
    prefixes::f33_the_nodes_own_addresses_are_never_captured,
    prefixes::packets_without_ports_do_not_get_around_a_prefix,
    prefixes::answers_of_prefixes_are_looked_up_again,
    neighbours::neighbours_need_an_address_of_the_family_and_a_device,
    neighbours::whoever_sends_what_is_too_big_is_told,
    neighbours::few_are_told,
    model::a_million_packets_go_where_the_model_says,
    gates::a_bound_of_staleness_ends_service,
    values::values_that_prove_another_key_are_misses,
    values::f49_replacement_under_load_leaks_nothing,
    values::f49_prefixes_under_replacement_leak_nothing,
    probes::probes_ask_and_change_nothing,
    probes::only_the_nonce_makes_a_probe,
    probes::a_mismatch_wakes_once_a_second,
    probes::debug_lines_have_a_switch,
    flows::a_workload_can_be_consumer_and_producer,
    wire::packets_reach_the_producer_and_come_back,
    wire::a_closed_row_stops_real_packets_and_only_those,
    wire::neighbours_are_reached_and_answer,
    wire::senders_learn_what_the_way_to_a_neighbour_takes,
    wire::two_consumers_with_one_address_get_their_own_answers,
    wire::a_closed_port_is_told_to_who_asked,
}
